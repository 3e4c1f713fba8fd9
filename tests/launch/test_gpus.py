"""The GPUs of this machine, as its driver tells of them, and the cluster that they are."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from echelon.launch import gpus
from echelon.launch.gpus import DriverGpus, OwnCluster, find_driver_gpus, own_cluster

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
