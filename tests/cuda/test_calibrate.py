"""The kernels of a GPU are measured, and a cluster file of them is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.api.calibrating.machine import calibrate_machine
from echelon.config.cluster.settings import read_cluster_file
from echelon.core.cluster import Cluster
from tests.cost.fit.tiny_workload import TINY

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]


def test_a_gpu_is_measured(tmp_path: Path) -> None:
    found = calibrate_machine(out=tmp_path / "gpu.toml", ranks=1, workload=TINY)
    assert found.cluster.backend == "nccl"
    assert found.device.device.efficiency.units > 1
    assert all(one.seconds > 0 for one in found.device.timed)
    read = read_cluster_file(found.out, "test")
    assert isinstance(read, Cluster)
    assert read.device.peak_flops
