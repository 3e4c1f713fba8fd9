"""Stages, microbatches, times and limits at random, for tests of the search and its parts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from echelon.schedule.action import Schedule
from echelon.schedule.automatic import split_cells
from echelon.schedule.check import check_schedule
from echelon.schedule.list_scheduling import ListScheduler
from echelon.schedule.simulate import Durations
from echelon.schedule.timer import ScheduleTimer
from tests.schedule.examples import SEEDS


def some_durations(num_stages: int, rng: random.Random) -> Durations:
    """Return times that differ from stage to stage; splitting may cost time, or gain some."""
    most = rng.choice((1, 9))
    forward, half, weight = (
        tuple(float(rng.randint(0 if most > 1 else 1, most)) for _ in range(num_stages))
        for _ in range(3)
    )
    share = rng.choice((1.0, 1.0, 0.75, 0.5, 1.25))
    return Durations(
        forward_s=forward,
        input_gradient_s=half,
        weight_gradient_s=weight,
        backward_s=tuple(share * (b + w) for b, w in zip(half, weight, strict=True)),
        transfer_s=tuple(rng.choice((0.0, 0.25, 1.0, 3.0)) for _ in range(num_stages - 1)),
    )


def durations_for(schedule: Schedule, seed: int) -> Durations:
    """Return random times for the stages of a schedule."""
    return some_durations(schedule.num_stages, random.Random(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold what a search is given."""

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    durations: Durations
    most_in_flight: tuple[int, ...] | None


def _case(seed: int) -> Case:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    per_rank = rng.choice((1, 1, 2, 3))
    stages = ranks * per_rank
    looped = [stage % ranks for stage in range(stages)]
    folded = [r if (s // ranks) % 2 == 0 else ranks - 1 - r for s, r in enumerate(looped)]
    limits = tuple(per_rank + rng.randint(0, 2 * ranks) for _ in range(ranks))
    return Case(
        stage_ranks=tuple(rng.choice((looped, folded, rng.sample(looped, stages)))),
        num_microbatches=rng.randint(1, 6),
        durations=some_durations(stages, rng),
        most_in_flight=rng.choice((None, limits, (per_rank,) * ranks)),
    )


cases = SEEDS.map(_case)
"""Up to 4 ranks with up to 3 stages each, in any place, with or without a limit of memory."""


def scheduler_of(case: Case) -> ListScheduler:
    clock = ScheduleTimer(case.stage_ranks, case.num_microbatches, case.durations)
    cells = len(case.stage_ranks) * case.num_microbatches
    return ListScheduler(clock, case.most_in_flight or (cells,) * clock.num_ranks)


def random_rows(case: Case, seed: int) -> tuple[ListScheduler, list[list[int]]]:
    rng = random.Random(seed)
    scheduler = scheduler_of(case)
    clock = scheduler.clock
    urgency = [rng.random() for _ in clock.duration_of]
    split = [
        [rng.random() < 0.5 for _ in range(case.num_microbatches)] for _ in range(clock.num_stages)
    ]
    backwards = rng.random() < 0.5
    patience = rng.choice((0.0, 0.5, 1.0))
    rows = scheduler.build(urgency, split, patience=patience, backwards=backwards)
    assert split_cells(clock, rows) == split
    return scheduler, rows


def is_within(scheduler: ListScheduler, rows: list[list[int]]) -> bool:
    report = check_schedule(scheduler.clock.schedule_of(rows, "any"))
    peaks = zip(report.peak_in_flight_per_rank, scheduler.limits, strict=True)
    return all(peak <= most for peak, most in peaks)
