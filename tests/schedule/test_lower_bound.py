"""The lower bound lies below every schedule, and on those that are known to be the best."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, build_schedule, schedule_problems
from echelon.schedule.check import peak_in_flight_per_rank
from echelon.schedule.lower_bound import lower_bound
from echelon.schedule.simulate import Durations, simulate
from tests.schedule.examples import SEEDS, runnable_schedules, schedule_of
from tests.schedule.search_cases import durations_for
from tests.walks import examples


def _bound(schedule: Schedule, durations: Durations, *, limited: bool = True) -> float:
    """Return the bound with the memory that the schedule itself uses, or without a limit."""
    peaks = peak_in_flight_per_rank(schedule)
    none = [schedule.num_microbatches * schedule.num_stages] * schedule.num_ranks
    limits = peaks if limited else none
    return lower_bound(schedule.stage_ranks, schedule.num_microbatches, durations, limits)


@settings(max_examples=examples(400))
@given(runnable_schedules, SEEDS)
def test_no_schedule_is_faster(schedule: Schedule, seed: int) -> None:
    durations = durations_for(schedule, seed)
    makespan = simulate(schedule, durations).makespan_s
    loose, tight = _bound(schedule, durations, limited=False), _bound(schedule, durations)
    assert loose <= tight * (1 + 1e-9)
    assert tight <= makespan * (1 + 1e-9)


@given(SEEDS)
def test_no_fixed_schedule_is_faster(seed: int) -> None:
    ranks, m = 1 + seed % 4, 1 + seed // 4 % 8
    for name in SCHEDULES:
        for stages in (ranks, 2 * ranks):
            numbers = {"num_stages": stages, "num_ranks": ranks, "num_microbatches": m}
            if schedule_problems(name, **numbers):
                continue
            schedule = build_schedule(name, **numbers)
            if not schedule.mirrored:
                durations = durations_for(schedule, seed)
                makespan = simulate(schedule, durations).makespan_s
                assert _bound(schedule, durations) <= makespan * (1 + 1e-9), name


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("transfer_s", [0, 0.25])
def test_zero_bubble_schedules_of_equal_stages_are_the_best(
    name: str, p: int, transfer_s: float
) -> None:
    m = 4 * p
    schedule = build_schedule(name, num_stages=p, num_ranks=p, num_microbatches=m)
    durations = Durations.uniform(p, transfer_s=transfer_s if name == "zb-h2" else 0)
    assert _bound(schedule, durations) == pytest.approx(simulate(schedule, durations).makespan_s)


def _one_by_one(p: int, m: int) -> Schedule:
    """Return the naive schedule with split backward passes: W need not be waited for."""
    rows = [
        " ".join(f"{kind}{stage}.{k}" for k in range(m) for kind in "FBW") for stage in range(p)
    ]
    return schedule_of(*rows, num_microbatches=m)


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 7])
def test_with_memory_for_one_microbatch_each_takes_its_chain(p: int, m: int) -> None:
    schedule = _one_by_one(p, m)
    durations = Durations.uniform(p, transfer_s=0.25)
    expected = m * (2 * p + 1 + 2 * 0.25 * (p - 1))
    assert simulate(schedule, durations).makespan_s == pytest.approx(expected)
    assert _bound(schedule, durations) == pytest.approx(expected)


def test_one_rank_has_only_its_work() -> None:
    durations = Durations.uniform(1, forward_s=2, backward_s=3)
    assert lower_bound((0,), 5, durations, (5,)) == 25


def test_a_slow_link_is_what_a_step_takes() -> None:
    durations = Durations.uniform(2, transfer_s=100)
    # F0.0, ten activations, then F1.9, B1.9, its gradient and the backward pass of stage 0
    assert lower_bound((0, 1), 10, durations, (10, 10)) == 1 + 10 * 100 + 1 + 1 + 100 + 2


def test_without_memory_for_their_w_the_ranks_idle_at_both_ends() -> None:
    p, m, wire = 16, 64, 0.2
    durations = Durations.uniform(p, transfer_s=wire)
    head = (2 * p - 1 + 2 * (p - 1) * wire) - p  # until the first B is back, rank 0 runs p F
    tail = (2 * p + 2 * (p - 1) * wire) - 2 * p  # from its last F to the end, it has p B and p W
    bound = lower_bound(tuple(range(p)), m, durations, (p,) * p)
    assert bound == pytest.approx(head + 3 * m + tail)


def test_where_splitting_costs_as_much_as_w_the_drain_is_idle() -> None:
    durations = Durations(
        forward_s=(1.0, 1.0),
        backward_s=(1.0, 1.0),
        input_gradient_s=(1.0, 1.0),
        weight_gradient_s=(1.0, 1.0),
        transfer_s=(0.0,),
    )
    # rank 1 starts at 1, works 2 per microbatch, and its last BW is followed by that of stage 0
    assert lower_bound((0, 1), 8, durations, (8, 8)) == 1 + 16 + 1
