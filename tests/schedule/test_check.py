"""The checker: what it proves of good schedules, and which cell it names of bad ones."""

from __future__ import annotations

import pytest
from hypothesis import given

from echelon.core.errors import InfeasiblePlan
from echelon.core.rulebook import schedule as rulebook
from echelon.core.rules import Rule
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.check import check_schedule
from tests.schedule.examples import runnable_schedules, schedule_of

GOOD = ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")


def _refused(schedule: Schedule) -> tuple[str, str]:
    """Return the one rule that `schedule` breaks, and what was said."""
    with pytest.raises(InfeasiblePlan) as caught:
        check_schedule(schedule)
    (rule,) = set(caught.value.rules)
    return rule, str(caught.value)


@given(runnable_schedules)
def test_whatever_can_run_is_accepted(schedule: Schedule) -> None:
    report = check_schedule(schedule)
    assert report.num_actions == sum(len(row) for row in schedule.actions)
    assert all(1 <= peak <= schedule.num_microbatches for peak in report.peak_in_flight_per_stage)
    for rank, peak in enumerate(report.peak_in_flight_per_rank):
        own = [report.peak_in_flight_per_stage[stage] for stage in schedule.stages_of(rank)]
        assert max(own) <= peak <= sum(own)


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


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (("F0.0 F0.0 F0.1 BW0.0 BW0.1", GOOD[1]), "F0.0 stands 2 times, not once"),
        (("F0.0 BW0.0 BW0.1", GOOD[1]), "stage 0, microbatch 1: F0.1 is missing"),
        ((GOOD[0], "F1.0 F1.1 BW1.0"), "stage 1, microbatch 1: BW (or B and W) is missing"),
        ((GOOD[0], "F1.0 F1.1 BW1.0 B1.1"), "stage 1, microbatch 1: W is missing"),
        ((GOOD[0], "F1.0 F1.1 BW1.0 W1.1"), "stage 1, microbatch 1: B is missing"),
        (
            (GOOD[0], GOOD[1] + " W1.1"),
            "stage 1, microbatch 1: BW stands beside W; a cell has one or the other",
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
    rule, text = _refused(schedule_of(*rows, num_microbatches=2))
    assert rule == "schedule-covers-once"
    assert says in text


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            ("F0.0 BW0.1 F0.1 BW0.0", GOOD[1]),
            "rank 0: BW0.1 at place 1 needs F0.1, which stands at place 2",
        ),
        (
            ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 W1.0 B1.0 BW1.1"),
            "rank 1: W1.0 at place 2 needs B1.0, which stands at place 3",
        ),
    ],
)
def test_an_action_before_what_it_needs_is_named(rows: tuple[str, str], says: str) -> None:
    rule, text = _refused(schedule_of(*rows, num_microbatches=2))
    assert rule == "schedule-keeps-order"
    assert says in text


def test_a_handover_on_one_rank_keeps_its_order_too() -> None:
    rows = ("F1.0 F0.0 BW0.0 BW1.0",)
    rule, text = _refused(schedule_of(*rows, num_microbatches=1, stage_ranks=(0, 0)))
    assert rule == "schedule-keeps-order"
    assert "F1.0 at place 0 needs F0.0, which stands at place 1" in text
    assert "BW0.0 at place 2 needs BW1.0, which stands at place 3" in text


def test_a_deadlock_names_each_rank_of_the_circle() -> None:
    rows = ("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")
    rule, text = _refused(schedule_of(*rows, num_microbatches=2))
    assert rule == "schedule-cannot-deadlock"
    assert "2 ranks wait in a circle" in text
    assert "rank 0 cannot start BW0.0 before BW1.0 on rank 1, which stands behind F1.1" in text
    assert "rank 1 cannot start F1.1 before F0.1 on rank 0, which stands behind BW0.0" in text


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (schedule_of(*GOOD, num_microbatches=2, stage_ranks=(0, 2)), "stage 1 is on rank 2"),
        (schedule_of(*GOOD, num_microbatches=2, stage_ranks=(0, 2)), "rank 1 owns no stage"),
        (schedule_of(*GOOD, num_microbatches=0), "0 microbatches; each must be at least 1"),
        (schedule_of(num_microbatches=1, stage_ranks=(0,)), "0 ranks, 1 stages"),
        (
            Schedule(
                name="short",
                num_ranks=2,
                num_microbatches=1,
                stage_ranks=(0, 1),
                actions=((Action(ActionKind.F, 0, 0),),),
            ),
            "1 lists of actions for 2 ranks",
        ),
    ],
)
def test_stages_that_are_not_placed_are_named(schedule: Schedule, says: str) -> None:
    rule, text = _refused(schedule)
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
    assert _refused(_example(rule.bad))[0] == rule.id
    check_schedule(_example(rule.fixed))
