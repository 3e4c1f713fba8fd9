"""Variables that ranks on GPUs get where the user has not set them by any of their names."""

from __future__ import annotations

from pathlib import Path

from echelon.launch.environment import local_environment
from echelon.launch.gpu_variables import GPU_DEFAULTS, dump_environment, gpu_environment


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
