"""The GPUs of this machine, as its driver tells of them, and the cluster that they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from echelon.launch import gpus
from echelon.launch.environment import local_environment
from echelon.launch.gpus import (
    GPU_DEFAULTS,
    DriverGpus,
    OwnCluster,
    dump_environment,
    find_driver_gpus,
    gpu_environment,
    own_cluster,
)

GB = 10**9


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NVIDIA L40S", "NVIDIA H100 80GB HBM3")
    told = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: len(names),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=(handle + 1) * GB),
        "nvmlDeviceGetName": lambda handle: names[handle],
    }
    for name, answer in told.items():
        monkeypatch.setattr(pynvml, name, answer)
    found = find_driver_gpus()
    assert found == DriverGpus(driver="570.1", gpus=((names[0], GB), (names[1], 2 * GB)))


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert find_driver_gpus() == DriverGpus()
    assert own_cluster() == OwnCluster(name=None)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("NVIDIA H100 80GB HBM3",) * 2, OwnCluster(name="2xh100")),
        (("NVIDIA L40S",) + ("NVIDIA GeForce RTX 4090",) * 10, OwnCluster(name="8xrtx4090")),
        (("NVIDIA Unheard Of",) * 3, OwnCluster(name=None, unknown="3 x NVIDIA Unheard Of")),
    ],
)
def test_most_gpus_of_a_kind_are_the_cluster(
    names: tuple[str, ...], wanted: OwnCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = DriverGpus(driver="1", gpus=tuple((name, 80 * GB) for name in names))
    monkeypatch.setattr(gpus, "find_driver_gpus", lambda: found)
    assert own_cluster() == wanted


def test_ranks_on_gpus_get_what_the_user_has_not_said_by_any_name() -> None:
    defaults = gpu_environment({})
    assert defaults == {one.name: one.value for one in GPU_DEFAULTS}
    assert defaults["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for one in GPU_DEFAULTS:
        for name in (one.name, *one.other_names):
            assert gpu_environment({name: "mine"}).keys() == defaults.keys() - {one.name}
    assert local_environment(2, {}).keys().isdisjoint(defaults)
    asked = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    given = local_environment(2, asked, backend="nccl")
    assert given.keys() >= defaults.keys() - {"PYTORCH_ALLOC_CONF"}
    assert "PYTORCH_ALLOC_CONF" not in given


def test_nccl_dumps_into_the_logs_unless_told_otherwise(tmp_path: Path) -> None:
    expected = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl-rank-"}
    assert dump_environment(tmp_path, "nccl", {}) == expected
    assert dump_environment(tmp_path, "gloo", {}) == {}
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        assert dump_environment(tmp_path, "nccl", {name: "/elsewhere/rank"}) == {}
