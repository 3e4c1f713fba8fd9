"""Where a DeepSpeed JSON lets slices rest between uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.imports import Imports, rows_of, zero


@pytest.fixture
def deepspeed(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "deepspeed")


def test_offload_to_files(deepspeed: Imports, tmp_path: Path) -> None:
    files = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False}
    config = zero(
        3,
        offload_optimizer={**files, "buffer_count": 16, "pipeline_read": True, "fast_init": False},
        offload_param={**files, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
    )
    found = deepspeed(config, ranks=2)
    place = found.job.plan.layout.zero
    assert (place.optimizer_offload, place.parameter_offload) == ("nvme", "nvme")
    assert (place.offload_dir, place.offload_buffers) == (str(tmp_path), 5)
    config["zero_optimization"]["offload_param"]["nvme_path"] = "/elsewhere"
    ((rule, _),) = deepspeed.refused(config, ranks=2)
    assert rule == "import-conflict"


def test_offload_to_host_needs_no_files(deepspeed: Imports) -> None:
    table = {"device": "cpu", "nvme_path": "/local", "buffer_count": 4, "max_in_cpu": 0}
    found = deepspeed(zero(2, offload_optimizer=table), ranks=2)
    assert found.job.plan.layout.zero.optimizer_offload == "host"
    assert "host" in rows_of(found, "zero_optimization.offload_optimizer.nvme_path")[0].why
    found = deepspeed(zero(2, cpu_offload=True, cpu_offload_use_pin_memory=True), ranks=2)
    assert found.job.plan.layout.zero.optimizer_offload == "host"
