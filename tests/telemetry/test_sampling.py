"""Steps that are kept: within the budget, the same on all ranks, whole rounds, the special ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.telemetry.sampling import WARM_UP, StepSampler
from tests.telemetry.runs import make_job


def kept_steps(sampler: StepSampler, size: int, first: int = 1) -> list[int]:
    """Return the steps that a rank writes whose steps take `size` bytes each."""
    found: list[int] = []
    for step in range(first, sampler.last_step + 1):
        if sampler.keeps(step):
            sampler.wrote(size)
            found.append(step)
    return found


def test_all_steps_are_kept_where_they_fit() -> None:
    sampler = StepSampler(budget_bytes=1100, last_step=100)
    assert kept_steps(sampler, 10) == [*range(1, 101)]
    assert sampler.says() == "every step"


@pytest.mark.parametrize("steps", [50, 217, 10_000])
@pytest.mark.parametrize("room", [12, 40, 1000])
def test_the_budget_holds_and_is_used(steps: int, room: int) -> None:
    sampler = StepSampler(budget_bytes=10 * room, last_step=steps)
    kept = kept_steps(sampler, 10)
    assert len(kept) <= room
    assert len(kept) >= min(steps, room // 2)
    assert kept[: min(steps, WARM_UP)] == [*range(1, 1 + min(steps, WARM_UP))]
    assert kept[-1] == steps


def test_steps_of_a_rank_with_fewer_are_those_of_the_others_too() -> None:
    ranks = [StepSampler(budget_bytes=5000, last_step=3000) for _ in range(3)]
    small, middle, large = (
        {*kept_steps(rank, size)} for rank, size in zip(ranks, (11, 37, 90), strict=True)
    )
    assert large < middle < small


def test_steps_that_save_or_validate_are_kept_while_there_is_room() -> None:
    sampler = StepSampler(budget_bytes=2000, last_step=10_000, periods=(100, 250))
    kept = {*kept_steps(sampler, 10)}
    assert {*range(100, 10_001, 100), *range(250, 10_001, 250)} <= kept
    assert len(kept) <= 200


def test_a_run_that_saves_each_step_stays_within_its_budget() -> None:
    sampler = StepSampler(budget_bytes=1000, last_step=10_000, periods=(1,))
    kept = kept_steps(sampler, 10)
    assert 40 <= len(kept) <= 100
    assert kept[-1] == 10_000


def test_rounds_are_kept_whole() -> None:
    sampler = StepSampler(budget_bytes=3000, last_step=1000, round_steps=10)
    kept = kept_steps(sampler, 10)
    rounds = {(step - 1) // 10 for step in kept}
    assert kept == [10 * one + step for one in sorted(rounds) for step in range(1, 11)]
    assert len(kept) <= 300
    assert sampler.says() == f"1 round of 10 steps of {sampler.stride}"


def test_a_budget_for_next_to_nothing_leaves_the_first_and_the_last_step() -> None:
    assert kept_steps(StepSampler(budget_bytes=1, last_step=100), 10) == [1, 100]


def test_a_start_begins_with_a_warm_up_of_its_own() -> None:
    sampler = StepSampler(budget_bytes=1000, last_step=5000, used_bytes=500)
    kept = kept_steps(sampler, 10, first=3001)
    assert kept[:WARM_UP] == [*range(3001, 3001 + WARM_UP)]
    assert sampler.used_bytes <= 1000


def test_a_job_says_the_budget_of_a_rank_and_what_is_special() -> None:
    job = make_job(steps=90)
    sampler = StepSampler.of_job(replace(job, checkpoint=replace(job.checkpoint, every=30)), 7)
    assert sampler.budget_bytes == 50e6 / job.plan.mesh.world_size
    assert sampler.periods[0] == 30
    assert (sampler.last_step, sampler.used_bytes, sampler.round_steps) == (90, 7, 1)
    settings = ("mesh.dp_replicate=2", "local_sgd.every=5", "observe.events_budget_bytes=2 MB")
    islands = StepSampler.of_job(load_job("nano", settings), 0)
    assert (islands.budget_bytes, islands.round_steps) == (1e6, 5)
