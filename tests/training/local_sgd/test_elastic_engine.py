"""Islands go on without one that is lost, and take it in where a round ends.

Evidence of row B06: an island whose rank is killed, stopped, hangs or raises is left out as a
whole, comes back, and checkpoints stay whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.serialize import to_json
from echelon.launch.local.messages import Limits, elastic_ranks
from echelon.launch.local.supervisor import LaunchOptions, RankPool, RunOutcome, run_ranks
from echelon.training.checkpoint.index import STATE_FILE, read_index
from echelon.training.loop import RankTask
from tests.training import small_runs
from tests.training.local_sgd import targets
from tests.training.small_runs import (
    checkpoint_of,
    read_steps,
    small_data,
    small_job,
    whole_state,
)

ISLANDS = (
    "mesh.dp_replicate=2",
    "mesh.tp=2",
    "local_sgd.every=2",
    "local_sgd.min_islands=1",
    "train.steps=12",
    "checkpoint.every=2",
)
THREE = ("mesh.dp_replicate=3", "mesh.tp=1", "batch.global_sequences=6")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("text"))


def job_of(folder: Path, data: Path, *settings: str, resume: Path | None = None) -> Any:
    """Return a job, and the task of its ranks."""
    given = {one.split("=")[0] for one in settings}
    kept = [one for one in ISLANDS if one.split("=")[0] not in given]
    job = small_job((*kept, *settings))
    folder.mkdir(exist_ok=True)
    task = RankTask(
        job=job,
        run_dir=str(folder),
        data=str(data),
        observer=f"{small_runs.__name__}:notes",
        resume=None if resume is None else str(resume),
    )
    return job, to_json(task)


def run(
    pool: RankPool, folder: Path, data: Path, *settings: str, resume: Path | None = None, **how: Any
) -> list[Any]:
    """Train on a pool, and return what each rank returns; its first rank cannot be lost."""
    job, task = job_of(folder, data, *settings, resume=resume)
    mesh, elastic = job.plan.mesh, elastic_ranks(job.plan)
    target = f"{targets.__name__}:train_and_lose"
    labels = [mesh.label(rank) for rank in range(mesh.world_size)]
    argument: Any = {"task": task, "how": "kill", **how}
    if elastic is None:
        target, argument = "echelon.training.loop:train_rank", task
    return pool.run(target, argument, mesh.world_size, labels=labels, elastic=elastic)


def start(folder: Path, data: Path, *settings: str, step_s: float = 60.0, **how: Any) -> RunOutcome:
    """Train in a run of its own, any rank of which may be lost."""
    job, task = job_of(folder, data, *settings)
    mesh = job.plan.mesh
    return run_ranks(
        targets.train_and_lose,
        {"task": task, "how": "kill", **how},
        world_size=mesh.world_size,
        labels=[mesh.label(rank) for rank in range(mesh.world_size)],
        options=LaunchOptions(
            limits=Limits(step_s=step_s), shown_rank=None, elastic=elastic_ranks(job.plan)
        ),
    )


def islands_in(folder: Path, step: int) -> set[str]:
    """Return the islands that have something in a checkpoint."""
    kinds = read_index(checkpoint_of(folder, step)).tensors
    return {kind.split(".")[0] for kind in kinds if kind.startswith("island-")}


@pytest.mark.system("B06")
def test_an_island_with_a_killed_rank_is_left_out_and_comes_back(
    rank_pool: RankPool, tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B06: rank 3 in step 6: island 1 missed the round of steps 5 and 6, and that of 7 and 8."""
    ended = run(rank_pool, tmp_path, data, lost={"3": 5}, back=8)

    error = capfd.readouterr().err
    assert "island 1 (ranks 2 to 3) is left out; the run goes on with 1 of 2 islands" in error
    (absence,) = ended[0].absences
    assert all(one.absences == ended[0].absences for one in ended)
    assert (absence.island, absence.first_step, absence.returned) == (1, 5, True)
    assert absence.last_step in (6, 8)
    assert (absence.first_round, absence.last_round) == (3, absence.last_step // 2)
    assert "SIGKILL" in absence.cause
    back = absence.last_step
    assert sorted(read_steps(tmp_path)) == list(range(1, 13))
    assert [step for step in read_steps(tmp_path, 2) if step > 6] == list(range(back + 1, 13))

    assert islands_in(tmp_path, 4) == islands_in(tmp_path, 12) == {"island-0", "island-1"}
    assert islands_in(tmp_path, 6) == {"island-0"}
    said = json.loads((checkpoint_of(tmp_path, 6) / STATE_FILE).read_text())["engine"]["islands"]
    assert said[1] is None
    said = json.loads((checkpoint_of(tmp_path, 12) / STATE_FILE).read_text())["engine"]["islands"]
    assert [one["num_updates"] for one in said] == [12, 12 - back]


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_that_lacks_an_island(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """B06: the island begins from the outer parameters, whether or not all are needed."""
    first = tmp_path / "first"
    run(rank_pool, first, data, "local_sgd.restarts=0", lost={"3": 5})
    middle = checkpoint_of(first, 8)
    assert islands_in(first, 8) == {"island-0"}

    states = []
    for name, settings in (("again", ()), ("all", ('local_sgd.min_islands="all"',))):
        ended = run(rank_pool, tmp_path / name, data, *settings, resume=middle)
        assert {one.steps for one in ended} == {12}
        states.append(whole_state(checkpoint_of(tmp_path / name, 12)))
    # Both take the same steps, in groups that are made otherwise.
    assert states[0].keys() == states[1].keys()
    assert any(name.startswith("island-1.") for name in states[0])
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_takes_the_steps_of_one_that_was_not_cut(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """B06: the same bits from a checkpoint of all islands."""
    run(rank_pool, tmp_path / "whole", data)
    run(rank_pool, tmp_path / "again", data, resume=checkpoint_of(tmp_path / "whole", 6))
    whole, again = (whole_state(checkpoint_of(tmp_path / name, 12)) for name in ("whole", "again"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "stop"])
def test_an_island_that_raises_or_stands_still_is_left_out(
    rank_pool: RankPool, tmp_path: Path, data: Path, how: str
) -> None:
    """B06: whatever a rank raises that is no error of ours."""
    ended = run(rank_pool, tmp_path, data, lost={"2": 5}, back=8, how=how)
    (absence,) = ended[0].absences
    assert (absence.island, absence.returned) == (1, True)
    assert ("planted" if how == "raise" else "SIGSTOP") in absence.cause


@pytest.mark.slow
def test_an_island_that_hangs_is_left_out(tmp_path: Path, data: Path) -> None:
    """B06: the first one, whose rank has not moved for the timeout of a step and waits for none."""
    outcome = start(tmp_path, data, lost={"0": 5}, back=8, how="hang", step_s=15.0)
    (absence,) = outcome.require()[2].absences
    assert (absence.island, absence.returned) == (0, True)
    assert "has not moved" in absence.cause


@pytest.mark.slow
def test_with_too_few_islands_the_run_ends_and_names_the_rank(tmp_path: Path, data: Path) -> None:
    """B06: three of which two are needed; the second loss ends the run, not its checkpoints."""
    settings = (*THREE, "local_sgd.min_islands=2", "local_sgd.restarts=0")
    outcome = start(tmp_path, data, *settings, lost={"2": 5, "1": 8})

    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert "SIGKILL" in outcome.failure.fault.summary
    assert [one.rank for one in outcome.lost] == [2]
    assert islands_in(tmp_path, 4) == {"island-0", "island-1", "island-2"}
    assert islands_in(tmp_path, 8) == {"island-0", "island-1"}


@pytest.mark.slow
def test_a_checkpoint_that_an_island_is_lost_in_is_written_by_those_that_are_left(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """B06: nothing of it is lost, and nothing that was committed is touched."""
    ended = run(rank_pool, tmp_path, data, "local_sgd.restarts=0", saves={"3": 6})
    assert ended[0].steps == 12
    for step in (2, 4, 6, 8, 10, 12):
        assert islands_in(tmp_path, step) == {"island-0", *(["island-1"] if step < 6 else [])}
