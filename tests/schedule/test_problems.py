"""What is wrong with the lists themselves is named by its place, and by what would be right."""

from __future__ import annotations

import pytest

from echelon.core.errors import InfeasiblePlan
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.check import check_schedule
from tests.schedule.examples import (
    refused,
    schedule_of,
)

GOOD = ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")


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
    rule, text = refused(schedule_of(*rows, num_microbatches=2))
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
    rule, text = refused(schedule_of(*rows, num_microbatches=2))
    assert rule == "schedule-keeps-order"
    assert says in text


def test_a_handover_on_one_rank_keeps_its_order_too() -> None:
    rows = ("F1.0 F0.0 BW0.0 BW1.0",)
    rule, text = refused(schedule_of(*rows, num_microbatches=1, stage_ranks=(0, 0)))
    assert rule == "schedule-keeps-order"
    assert "F1.0 at place 0 needs F0.0, which stands at place 1" in text
    assert "BW0.0 at place 2 needs BW1.0, which stands at place 3" in text


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
