"""The checker: what it proves of good schedules, and which cell it names of bad ones."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from echelon.core.errors import InfeasiblePlan
from echelon.core.rulebook import pipeline as rulebook
from echelon.core.rules import Rule
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.check import check_schedule
from tests.schedule.examples import (
    SEEDS,
    mirrored_schedules,
    ordered_schedules,
    refused,
    runnable_schedules,
    schedule_of,
)
from tests.schedule.mutations import MUTATIONS, is_valid, limits_of, mutated, mutated_schedules

Mutation = Callable[[list[list[Action]], random.Random], None]

GOOD = ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")


def _accepted(schedule: Schedule, limits: tuple[int, ...] | None = None) -> bool:
    try:
        check_schedule(schedule, most_in_flight=limits)
    except InfeasiblePlan:
        return False
    return True


@given(runnable_schedules)
def test_whatever_can_run_is_accepted(schedule: Schedule) -> None:
    report = check_schedule(schedule)
    assert report.num_actions == sum(len(row) for row in schedule.actions)
    assert all(1 <= peak <= schedule.num_microbatches for peak in report.peak_in_flight_per_stage)
    for rank, peak in enumerate(report.peak_in_flight_per_rank):
        own = [report.peak_in_flight_per_stage[stage] for stage in schedule.stages_of(rank)]
        assert max(own) <= peak <= sum(own)


@given(mirrored_schedules)
def test_microbatches_may_cross_the_other_way_round(schedule: Schedule) -> None:
    report = check_schedule(schedule)
    assert is_valid(schedule, report.peak_in_flight_per_rank)


@given(mutated_schedules)
def test_a_schedule_is_accepted_exactly_where_it_runs(schedule: Schedule) -> None:
    assert _accepted(schedule) is is_valid(schedule)


@given(ordered_schedules)
def test_a_schedule_in_order_is_accepted_exactly_where_its_ranks_finish(
    schedule: Schedule,
) -> None:
    assert _accepted(schedule) is is_valid(schedule)


@given(mirrored_schedules, SEEDS)
def test_memory_is_accepted_exactly_within_its_limits(schedule: Schedule, seed: int) -> None:
    limits = limits_of(schedule, random.Random(seed))
    assert _accepted(schedule, limits) is is_valid(schedule, limits)
    peaks = check_schedule(schedule).peak_in_flight_per_rank
    assert _accepted(schedule, peaks)
    for rank, peak in enumerate(peaks):
        assert not _accepted(schedule, (*peaks[:rank], peak - 1, *peaks[rank + 1 :]))


def test_the_mutations_break_schedules_in_every_way_and_leave_some_whole() -> None:
    rules: Counter[str] = Counter()
    for seed in range(400):
        try:
            check_schedule(mutated(seed))
            rules["none"] += 1
        except InfeasiblePlan as error:
            rules.update(set(error.rules))
    assert set(rules) == {
        "none",
        "schedule-places-stages",
        "schedule-covers-once",
        "schedule-keeps-order",
        "schedule-cannot-deadlock",
    }
    assert min(rules.values()) >= 5


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_mutation_can_break_a_schedule(mutation: Mutation) -> None:
    whole = build_schedule("1f1b", num_stages=3, num_ranks=3, num_microbatches=4)
    broken = 0
    for seed in range(20):
        rows = [list(row) for row in whole.actions]
        mutation(rows, random.Random(seed))
        changed = replace(whole, actions=tuple(tuple(row) for row in rows))
        assert _accepted(changed) is is_valid(changed)
        broken += not is_valid(changed)
    assert broken > 0


@given(mutated_schedules)
def test_every_problem_names_a_rank_or_what_is_wrong_with_the_whole(schedule: Schedule) -> None:
    try:
        check_schedule(schedule)
    except InfeasiblePlan as error:
        for problem in error.problems:
            if problem.rule != "schedule-places-stages" and "more of the same" not in str(error):
                assert re.search(r"\brank \d", problem.message), problem


def test_a_limit_names_where_it_is_passed_and_what_would_do() -> None:
    schedule = schedule_of(
        "F0.0 F0.1 F0.2 BW0.0 BW0.1 BW0.2",
        "F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2",
        num_microbatches=3,
    )
    with pytest.raises(InfeasiblePlan) as caught:
        check_schedule(schedule, most_in_flight=(1, 1))
    (problem,) = caught.value.problems
    assert problem.rule == "schedule-within-memory"
    assert "rank 0 holds the activations of 2 (stage, microbatch) pairs from F0.1" in str(problem)
    assert "(place 1) on, and 3 at its peak; its limit is 1" in problem.message
    assert problem.suggestions == ("a limit of 3 for rank 0",)
    check_schedule(schedule, most_in_flight=(3, 1))


def test_a_wait_for_an_action_that_waits_itself_is_told_as_that() -> None:
    schedule = schedule_of(
        "F2.0 F0.0 BW2.0 BW0.0", "F1.0 BW1.0", num_microbatches=1, stage_ranks=(0, 1, 0)
    )
    text = refused(schedule)[1]
    assert "rank 0 cannot start F2.0 before F1.0 on rank 1, which waits too" in text
    assert "rank 1 cannot start F1.0 before F0.0 on rank 0, which stands behind F2.0" in text
    assert "works here: on rank 0 F0.0 before F2.0" in text


def test_what_would_free_the_ranks_does() -> None:
    stuck = schedule_of("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1", num_microbatches=2)
    with pytest.raises(InfeasiblePlan) as caught:
        check_schedule(stuck)
    assert caught.value.problems[0].suggestions == (
        "on rank 1 BW1.0 before F1.1",
        "on rank 0 F0.1 before BW0.0",
    )
    for rows in (
        ("F0.0 BW0.0 F0.1 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"),
        ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"),
    ):
        check_schedule(schedule_of(*rows, num_microbatches=2))


def test_numbers_without_end_are_refused_without_counting_to_them() -> None:
    whole = schedule_of(*GOOD, num_microbatches=2)
    with pytest.raises(InfeasiblePlan) as caught:
        check_schedule(replace(whole, num_microbatches=10**12))
    assert f"and {2 * (10**12 - 2) - 8} more of the same kind" in str(caught.value)
    with pytest.raises(InfeasiblePlan):
        check_schedule(replace(whole, num_ranks=10**12))


def test_a_split_backward_pass_holds_activations_until_the_weight_gradient() -> None:
    late = schedule_of("F0.0 B0.0 F0.1 B0.1 W0.0 W0.1", num_microbatches=2)
    soon = schedule_of("F0.0 B0.0 W0.0 F0.1 B0.1 W0.1", num_microbatches=2)
    assert check_schedule(late).peak_in_flight_per_rank == (2,)
    assert check_schedule(soon).peak_in_flight_per_rank == (1,)


def test_a_rank_with_two_stages_adds_up_what_they_hold() -> None:
    schedule = schedule_of("F0.0 F1.0 BW1.0 BW0.0", num_microbatches=1, stage_ranks=(0, 0))
    report = check_schedule(schedule)
    assert report.peak_in_flight_per_stage == (1, 1)
    assert report.peak_in_flight_per_rank == (2,)
    assert report.num_messages == 0


def test_a_deadlock_names_each_rank_of_the_circle() -> None:
    rows = ("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")
    rule, text = refused(schedule_of(*rows, num_microbatches=2))
    assert rule == "schedule-cannot-deadlock"
    assert "2 ranks wait in a circle" in text
    assert "rank 0 cannot start BW0.0 before BW1.0 on rank 1, which stands behind F1.1" in text
    assert "rank 1 cannot start F1.1 before F0.1 on rank 0, which stands behind BW0.0" in text


def _example(text: str) -> Schedule:
    rows = [line.split(":")[1].split("#")[0] for line in text.splitlines() if "rank" in line]
    return schedule_of(*rows, num_microbatches=2)


@pytest.mark.parametrize(
    "rule",
    [
        rulebook.SCHEDULE_COVERS_ONCE,
        rulebook.SCHEDULE_KEEPS_ORDER,
        rulebook.SCHEDULE_CANNOT_DEADLOCK,
    ],
    ids=lambda rule: rule.id,
)
def test_the_examples_of_the_rulebook_are_what_they_say(rule: Rule) -> None:
    assert refused(_example(rule.bad))[0] == rule.id
    check_schedule(_example(rule.fixed))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (("F0.0 F0.0 F0.1 BW0.0 BW0.1", GOOD[1]), "F0.0 appears 2 times, not once"),
        (("F0.0 BW0.0 BW0.1", GOOD[1]), "stage 0, microbatch 1: F0.1 is missing"),
        ((GOOD[0], "F1.0 F1.1 BW1.0"), "stage 1, microbatch 1: BW (or B and W) is missing"),
        ((GOOD[0], "F1.0 F1.1 BW1.0 B1.1"), "stage 1, microbatch 1: W is missing"),
        ((GOOD[0], "F1.0 F1.1 BW1.0 W1.1"), "stage 1, microbatch 1: B is missing"),
        (
            (GOOD[0], GOOD[1] + " W1.1"),
            "stage 1, microbatch 1: BW appears with W; a cell has one or the other",
        ),
        ((GOOD[0] + " F0.2", GOOD[1]), "rank 0, place 4: F0.2 is outside of the 2 stages"),
        ((GOOD[0] + " F2.0", GOOD[1]), "rank 0, place 4: F2.0 is outside of the 2 stages"),
        (
            ("F0.0 F0.1 BW0.0 BW0.1 F1.1", "F1.0 BW1.0 BW1.1"),
            "rank 0, place 4: F1.1, but stage 1 is on rank 1",
        ),
    ],
)
def test_a_cell_that_is_not_covered_once_is_named(rows: tuple[str, str], says: str) -> None:
    rule, text = refused(schedule_of(*rows, num_microbatches=2))
    assert rule == "schedule-covers-once"
    assert says in text


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            ("F0.0 BW0.1 F0.1 BW0.0", GOOD[1]),
            "rank 0: BW0.1 at place 1 needs F0.1, which is at place 2",
        ),
        (
            ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 W1.0 B1.0 BW1.1"),
            "rank 1: W1.0 at place 2 needs B1.0, which is at place 3",
        ),
    ],
)
def test_an_action_before_what_it_needs_is_named(rows: tuple[str, str], says: str) -> None:
    rule, text = refused(schedule_of(*rows, num_microbatches=2))
    assert rule == "schedule-keeps-order"
    assert says in text


def test_a_handover_on_one_rank_keeps_its_order_too() -> None:
    rows = ("F1.0 F0.0 BW0.0 BW1.0",)
    rule, text = refused(schedule_of(*rows, num_microbatches=1, stage_ranks=(0, 0)))
    assert rule == "schedule-keeps-order"
    assert "F1.0 at place 0 needs F0.0, which is at place 1" in text
    assert "BW0.0 at place 2 needs BW1.0, which is at place 3" in text


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (schedule_of(*GOOD, num_microbatches=2, stage_ranks=(0, 2)), "stage 1 is on rank 2"),
        (schedule_of(*GOOD, num_microbatches=2, stage_ranks=(0, 2)), "rank 1 owns no stage"),
        (schedule_of(*GOOD, num_microbatches=0), "0 microbatches; each must be at least 1"),
        (schedule_of(num_microbatches=1, stage_ranks=(0,)), "0 ranks, 1 stage"),
        (
            Schedule(
                name="short",
                num_ranks=2,
                num_microbatches=1,
                stage_ranks=(0, 1),
                actions=((Action(ActionKind.F, 0, 0),),),
            ),
            "1 list of actions for 2 ranks",
        ),
    ],
)
def test_stages_that_are_not_placed_are_named(schedule: Schedule, says: str) -> None:
    rule, text = refused(schedule)
    assert rule == "schedule-places-stages"
    assert says in text


def test_a_fault_in_every_microbatch_is_told_a_few_times_and_counted() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=50)
    empty = Schedule(
        name="empty",
        num_ranks=2,
        num_microbatches=50,
        stage_ranks=(0, 1),
        actions=(schedule.actions[0], ()),
    )
    with pytest.raises(InfeasiblePlan) as caught:
        check_schedule(empty)
    assert len(caught.value.problems) == 9
    assert "and 42 more of the same kind" in caught.value.problems[-1].message
