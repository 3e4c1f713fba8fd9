"""Under torchrun: join, find who failed first without a supervisor, and survive a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.launch.gpus import GPU_DEFAULTS
from echelon.launch.launched import rank as launched_rank
from echelon.launch.local.rank_processes import listen_on_port
from echelon.launch.local.supervisor import LaunchOptions

ROOT = Path(__file__).parents[3]


def torchrun(
    argument: dict[str, Any], tmp_path: Path, *, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", "2", "--standalone", "--max-restarts", str(restarts)),
        *("-m", "tests.launch.torchrun_script", json.dumps(argument), "2", str(tmp_path)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    return subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_restart_finds_no_trace_of_the_failed_attempt(tmp_path: Path) -> None:
    done = torchrun({"rank": 1, "how": "raise"}, tmp_path, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "error[rank-raised]: rank 1 (dp1): ValueError: the loss of my life" in done.stderr
    assert done.stderr.count("    raise ValueError") == 1
    assert "rank 0 (dp0) stops for rank 1 (dp1): ValueError" in done.stderr
    assert "result 0 ({'done': True},)" in done.stdout
    assert "result 1 ({'done': True},)" in done.stdout
    assert "result 0" in (tmp_path / "rank-0000.log").read_text()


@pytest.mark.system("S51")
def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    done = torchrun({"rank": 0, "how": "stop"}, tmp_path)
    assert done.returncode == 1
    assert "error[rank-stopped]: rank 0 (dp0): is stopped (SIGSTOP)" in done.stderr


@pytest.mark.slow  # local ranks do the same in every run of the tests
def test_a_rank_that_raises_with_a_collective_in_flight_is_heard_at_once(tmp_path: Path) -> None:
    done = torchrun({"target": "raise_in_flight", "step_s": 3.0}, tmp_path)
    assert done.returncode == 1
    assert "error[rank-raised]: rank 1 (dp1): ValueError: the loss of my life" in done.stderr
    assert "rank 0 (dp0) stops for rank 1 (dp1): ValueError" in done.stderr


def test_a_rank_on_a_gpu_has_its_environment_before_the_driver_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listen_on_port(0) as free:
        port = free.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    for one in GPU_DEFAULTS:
        monkeypatch.setenv(one.name, "restored when the test ends")
        monkeypatch.delenv(one.name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    monkeypatch.setattr(launched_rank, "_READ_S", 0.0)
    # It would end this process when the store is gone.
    monkeypatch.setattr(launched_rank.Watchdog, "start", lambda one: None)
    found: dict[str, str] = {}

    def device_of(backend: str, local_rank: int, launcher: str) -> None:
        found.update({one.name: os.environ[one.name] for one in GPU_DEFAULTS})
        raise KeyError("no GPU")

    monkeypatch.setattr(launched_rank, "device_of", device_of)
    outcome = launched_rank.run_joined(
        lambda joined: None, {}, labels=("",), options=LaunchOptions(backend="nccl")
    )
    assert outcome.failure is not None
    expected = {one.name: one.value for one in GPU_DEFAULTS}
    assert found == expected | {"TORCH_FR_BUFFER_SIZE": "7"}


@pytest.mark.slow  # local ranks do the same in every run of the tests
def test_where_all_ranks_wait_the_one_whose_turn_it_is_is_named(tmp_path: Path) -> None:
    done = torchrun({"target": "wait_in_turn", "step_s": 3.0}, tmp_path)
    assert done.returncode == 1
    assert "error[rank-stuck]: rank 1 (dp1): has not moved for " in done.stderr
    assert "neither has any other rank: it waits in a message at F1.0" in done.stderr
    assert "last heard of at step 1" in done.stderr
