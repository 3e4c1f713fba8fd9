"""Runs with parameter servers: what data ranks compute, checkpoints of any layout, lost servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.faults.__main__ import ranks_of
from echelon.core.serialize import to_json
from echelon.launch.local.supervisor import RankPool
from echelon.training.loop import RankTask, TrainSummary
from tests.training import small_runs
from tests.training.loop.test_loop_faults_zero import losses, wait_for_step
from tests.training.small_runs import (
    FP64,
    TINY,
    checkpoint_of,
    read_steps,
    small_data,
    small_job,
    train,
    whole_state,
)

DATA_RANKS = ("mesh.dp_replicate=2",)
SERVED = (*DATA_RANKS, "servers.count=2")
BOUND_0 = (*SERVED, "servers.updates=asynchronous", "servers.max_staleness=0")
BOUND_1 = (*SERVED, "servers.updates=asynchronous", "servers.max_staleness=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("text"))


@pytest.mark.system("S06")
def test_synchronous_servers_train_as_data_ranks_do_and_go_on_as_they_do(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """S06: in float64, from the first step on, and from a checkpoint of the other layout."""
    for name, layout in (("ranks", DATA_RANKS), ("served", SERVED)):
        train(rank_pool, tmp_path / name, data, (*layout, *FP64))
    expected = read_steps(tmp_path / "ranks")
    for name, layout, other in (("a", DATA_RANKS, "served"), ("b", SERVED, "ranks")):
        middle = checkpoint_of(tmp_path / other, 4)
        train(rank_pool, tmp_path / name, data, (*layout, *FP64), resume=middle)

    for name in ("served", "a", "b"):
        for step, values in read_steps(tmp_path / name).items():
            assert values == pytest.approx(expected[step], rel=1e-10), (name, step)
    states = [whole_state(checkpoint_of(tmp_path / name, 8)) for name in ("ranks", "served")]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.system("S07")
def test_a_bound_of_zero_trains_and_goes_on_as_synchronous_servers_do(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """S07: the same bits after all steps, with a resume between."""
    train(rank_pool, tmp_path / "whole", data, SERVED)
    train(rank_pool, tmp_path / "bound", data, BOUND_0)
    middle = checkpoint_of(tmp_path / "bound", 4)
    train(rank_pool, tmp_path / "again", data, BOUND_0, resume=middle)

    states = [whole_state(checkpoint_of(tmp_path / n, 8)) for n in ("whole", "bound", "again")]
    for other in states[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in states[0].items())


def test_asynchronous_workers_go_on_from_a_checkpoint(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """S07: clocks and versions go on where they were; the loss falls."""
    run, job = tmp_path / "apart", small_job(BOUND_1)
    run.mkdir()
    for resume in (None, str(checkpoint_of(run, 4))):
        task = RankTask(
            job=job,
            run_dir=str(run if resume is None else tmp_path),
            data=str(data),
            observer=f"{small_runs.__name__}:notes",
            resume=resume,
        )
        labels = [job.plan.mesh.label(rank) for rank in range(4)]
        ended = rank_pool.run("echelon.training.loop:train_rank", to_json(task), 4, labels=labels)
        assert isinstance(ended, list)
        assert {one.steps for one in ended} == {8}
    assert sorted(read_steps(tmp_path)) == [5, 6, 7, 8]
    steps = read_steps(run)
    assert steps[8][0] < steps[1][0]


@pytest.mark.system("S07")
def test_asynchronous_workers_validate_what_a_checkpoint_of_that_step_has(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """S07: all pushes of all workers are in it, though a worker may not have pulled the last."""
    run, job = tmp_path / "apart", small_job((*BOUND_1, "train.validate_every=4"))
    run.mkdir()
    found: list[TrainSummary] = []
    for resume in (None, 8):
        task = RankTask(
            job=job,
            run_dir=str(run if resume is None else tmp_path / f"again{resume}"),
            data=str(data),
            observer=f"{small_runs.__name__}:validated_notes",
            resume=None if resume is None else str(checkpoint_of(run, resume)),
        )
        Path(task.run_dir).mkdir(exist_ok=True)
        labels = [job.plan.mesh.label(rank) for rank in range(4)]
        ended = rank_pool.run("echelon.training.loop:train_rank", to_json(task), 4, labels=labels)
        assert len({one.last_validation for one in ended}) == 1
        found.append(ended[0])
    whole, last = found
    assert last.first_validation == whole.last_validation
    assert whole.last_validation != whole.first_validation


@pytest.mark.slow
@pytest.mark.system("S07")
@pytest.mark.parametrize("updates", ["synchronous", "asynchronous"])
def test_a_killed_worker_ends_the_run_as_any_rank_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    """S07: within seconds, and the worker and its cause are named."""
    monkeypatch.chdir(tmp_path)
    small_data(tmp_path)
    kept = [one for one in TINY if not one.startswith("train.steps")]
    sets = [*kept, *SERVED, f"servers.updates={updates}", "train.steps=4000"]
    command = [sys.executable, "-m", "echelon", "train", "nano"]
    command += [word for one in (*sets, "data.source=words.txt") for word in ("--set", one)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        try:
            wait_for_step(tmp_path / "runs/nano/metrics.jsonl", 5, run)
            ranks = ranks_of(run.pid)
            os.kill(ranks[1].pid, signal.SIGKILL)
            error = run.communicate(timeout=60)[1].decode()
        finally:
            run.kill()
    assert run.returncode == 4
    assert "rank-killed" in error
    assert "rank 1 (dp_replicate1)" in error
    assert "SIGKILL" in error
    assert not any(one.is_running() for one in ranks)


@pytest.mark.slow
def test_a_killed_server_ends_the_run_which_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S06: the server is named, and with --resume its ranges come from the last checkpoint."""
    monkeypatch.chdir(tmp_path)
    small_data(tmp_path)
    kept = [one for one in TINY if not one.startswith("train.steps")]
    sets = [*kept, "servers.count=1", "train.steps=40", "data.source=words.txt"]
    command = [sys.executable, "-m", "echelon", "train", "nano"]
    command += [word for one in sets for word in ("--set", one)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        try:
            wait_for_step(tmp_path / "runs/nano/metrics.jsonl", 5, run)
            worker, server = ranks_of(run.pid)
            os.kill(server.pid, signal.SIGKILL)
            error = run.communicate(timeout=120)[1].decode()
        finally:
            run.kill()
    assert run.returncode == 4
    assert "rank-killed" in error
    assert "server0" in error
    assert not worker.is_running()

    again = subprocess.run(
        [*command, "--resume", "runs/nano"], capture_output=True, check=False, timeout=300
    )
    assert again.returncode == 0, again.stderr.decode()
    assert max(losses(tmp_path)) == 40
