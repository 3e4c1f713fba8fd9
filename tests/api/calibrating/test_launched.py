"""Calibration under torchrun: links in nodes and between them, and a plan that reads them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.config.cluster.file import read_calibration
from echelon.config.cluster.settings import read_cluster_file
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.cost.seconds.from_plan import cost_inputs_from_plan

ROOT = Path(__file__).parents[3]


def _start(flags: list[str], out: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    return subprocess.Popen(
        [*command, "-m", "tests.api.calibrating.launched_script", str(out), how],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finished(started: list[subprocess.Popen[str]]) -> list[str]:
    told = [one.communicate(timeout=200) for one in started]
    assert [one.returncode for one in started] == [0] * len(started), told
    return [out for out, _ in told]


@pytest.mark.slow
def test_two_nodes_of_one_rank_have_a_network(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    (told,) = _finished([_start(["--standalone", "--nproc-per-node", "2"], out, "pretend")])
    assert told.count("measuring 19 kernels on one rank\n") == 1
    assert sorted(line[:7] for line in told.splitlines() if line[:4] == "rank") == [
        "rank 0:",
        "rank 1:",
    ]
    cluster = read_cluster_file(out, "a test")
    assert isinstance(cluster, Cluster)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 1)
    assert [(link.name, link.degree) for link in cluster.links] == [("Gloo between hosts", 2)]
    # What is unfinished is gone.
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]


@pytest.mark.slow  # one process refuses as much, in test_machine.py
def test_torchrun_writes_over_no_file(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    out.touch()
    again = _start(["--standalone", "--nproc-per-node", "2"], out, "pretend")
    assert "error[never-overwrite]" in again.communicate(timeout=200)[1]
    assert again.returncode != 0


@pytest.mark.slow
def test_a_plan_reads_both_tiers_of_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    nodes = [
        _start([*place, "--master-port", str(port), "--node-rank", str(node)], out, "really")
        for node in range(2)
    ]
    first, second = _finished(nodes)
    assert "measuring 28 collectives of 2, 4 ranks\n" in first
    assert "measuring" not in second
    record = read_calibration(out)
    assert record is not None
    assert (record.nodes, record.ranks_per_node) == (2, 2)
    plan = load_job("nano", [f"cluster.file={out}", "mesh.dp_replicate=4"]).plan
    near, far = plan.cluster.links
    assert (near.degree, far.degree) == (2, 4)
    tiers = cost_inputs_from_plan(plan).machine.tiers
    assert [(one.degree, one.latency_s) for one in tiers] == [
        (2.0, near.latency_s),
        (4.0, far.latency_s),
    ]
