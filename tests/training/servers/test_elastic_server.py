"""Servers go on without a worker that is killed, and take it in when it is back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.core.serialize import to_json
from echelon.launch.local.elastic_ranks import elastic_ranks
from echelon.launch.local.supervisor import RankPool
from echelon.training.checkpoint.index import STATE_FILE
from echelon.training.loop import RankTask
from tests.training import small_runs
from tests.training.servers import targets
from tests.training.small_runs import checkpoint_of, read_steps, small_data, small_job

ELASTIC = (
    "mesh.dp_replicate=2",
    "servers.count=2",
    "servers.updates=asynchronous",
    "train.steps=16",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("text"))


def run(
    pool: RankPool,
    folder: Path,
    data: Path,
    *settings: str,
    needed: str = "1",
    lost: int = 1,
    step: int = 3,
    resume: Path | None = None,
) -> list[Any]:
    """Train, with one worker killed before a step, and return what each rank returns."""
    job = small_job((*ELASTIC, f"servers.min_workers={needed}", *settings))
    folder.mkdir(exist_ok=True)
    task = RankTask(
        job=job,
        run_dir=str(folder),
        data=str(data),
        observer=f"{small_runs.__name__}:notes",
        resume=None if resume is None else str(resume),
    )
    argument = {"task": to_json(task), "rank": lost, "step": step, "pause_s": 0.25}
    mesh = job.plan.mesh
    return pool.run(
        f"{targets.__name__}:train_and_lose",
        argument,
        mesh.world_size,
        labels=[mesh.label(rank) for rank in range(mesh.world_size)],
        elastic=elastic_ranks(job.plan),
    )


@pytest.mark.slow
@pytest.mark.system("S07")
def test_a_killed_worker_is_dropped_and_comes_back(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """S07: both servers tell the same steps that count nowhere; a checkpoint says its updates."""
    ended = run(rank_pool, tmp_path, data)

    first, second = ended[2:]
    assert first.steps == second.steps == 16
    (absence,) = first.absences
    assert absence == second.absences[0]
    assert (absence.worker, absence.returned, absence.first_step) == (1, True, 4)
    assert "SIGKILL" in absence.cause
    assert ended[1].steps == 16
    back = absence.last_step
    for step in (2, 16):
        state = json.loads((checkpoint_of(tmp_path, step) / STATE_FILE).read_text())
        assert state["engine"]["num_updates"] == 2 * step - (absence.num_steps if step > 3 else 0)
    taken = [sorted(read_steps(tmp_path, rank)) for rank in (0, 1, 2)]
    assert taken[0] == taken[2] == list(range(1, 17))
    # What it noted before it was killed may not have reached the disk.
    assert [step for step in taken[1] if step > 3] == list(range(back + 1, 17))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_that_lacks_updates(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """S07: versions and clocks part where a worker missed steps; with all workers needed, too."""
    run(rank_pool, tmp_path / "lost", data, "servers.restarts=0")
    middle = checkpoint_of(tmp_path / "lost", 8)
    state = json.loads((middle / STATE_FILE).read_text())
    assert state["engine"]["num_updates"] == 8 + 3

    for name, needed in (("again", "1"), ("all", '"all"')):
        ended = run(rank_pool, tmp_path / name, data, needed=needed, lost=9, resume=middle)
        assert {one.steps for one in ended} == {16}
        assert ended[2].absences == ()
        assert sorted(read_steps(tmp_path / name, 2)) == list(range(9, 17))
        last = json.loads((checkpoint_of(tmp_path / name, 16) / STATE_FILE).read_text())
        assert last["engine"]["num_updates"] == 11 + 2 * 8


def test_a_worker_that_stays_away_is_missed_to_the_end(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """S07: the loss of a step is that of the workers that are there, and it falls."""
    ended = run(rank_pool, tmp_path, data, "servers.restarts=0")

    (absence,) = ended[2].absences
    assert (absence.first_step, absence.last_step, absence.returned) == (4, 16, False)
    assert ended[1] is None
    steps = read_steps(tmp_path, 2)
    assert steps[16][0] < steps[1][0]
