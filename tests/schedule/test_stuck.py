"""The drawing of a circle of waits."""

from __future__ import annotations

from hypothesis import given

from echelon.schedule.action import Schedule
from echelon.schedule.cells import Cells
from echelon.schedule.deadlock import stuck_cycle
from echelon.schedule.stuck import draw_stuck
from tests.schedule.examples import ordered_schedules, schedule_of

LEGEND = "[ ] cannot start      ( ) would end the wait of the rank whose arrow comes here\n"


def test_two_ranks_in_a_circle() -> None:
    schedule = schedule_of("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1", num_microbatches=2)
    drawn = [
        "+-> rank 0:  F0.0 [BW0.0] (F0.1) BW0.1",
        "|              |  cannot start BW0.0 before BW1.0",
        "|              v",
        "|   rank 1:  F1.0 [F1.1] (BW1.0) BW1.1",
        "|              |  cannot start F1.1 before F0.1",
        "+--------------+",
        LEGEND,
    ]
    assert draw_stuck(schedule, stuck_cycle(schedule)) == "\n".join(drawn)


def test_what_does_not_matter_is_left_out_and_cells_are_named() -> None:
    count = 9
    first = " ".join(f"F0.{m}" for m in range(count - 1)) + " BW0.0 "
    rest = " ".join(f"BW0.{m}" for m in range(1, count))
    second = [f"{kind}1.{m}" for kind in ("F", "BW") for m in range(count)]
    schedule = schedule_of(
        f"{first} {rest} F0.{count - 1}".replace(f"BW0.{count - 1} ", "") + f" BW0.{count - 1}",
        " ".join(second),
        num_microbatches=count,
    )
    names = tuple(
        tuple(f"row {rank + 1}, column {place + 1}" for place in range(len(row)))
        for rank, row in enumerate(schedule.actions)
    )
    cells = Cells(source="mine.csv", rows=("row 1", "row 2"), cells=names)
    lines = draw_stuck(schedule, stuck_cycle(schedule), cells).splitlines()
    assert lines[0] == "+-> rank 0:  ... F0.6 F0.7 [BW0.0] BW0.1 ... BW0.7 (F0.8) BW0.8"
    assert lines[1].endswith("cannot start BW0.0 (row 1, column 9) before BW1.0")
    assert lines[3] == "|   rank 1:  ... F1.6 F1.7 [F1.8] (BW1.0) BW1.1 ..."


def test_a_rank_that_waits_for_one_that_waits() -> None:
    schedule = schedule_of(
        "F2.0 F0.0 BW2.0 BW0.0", "F1.0 BW1.0", num_microbatches=1, stage_ranks=(0, 1, 0)
    )
    lines = draw_stuck(schedule, stuck_cycle(schedule)).splitlines()
    assert lines[0] == "+-> rank 0:  [F2.0] (F0.0) BW2.0 ..."
    assert lines[3] == "|   rank 1:  [(F1.0)] BW1.0"


def test_a_rank_may_wait_for_itself() -> None:
    schedule = schedule_of("F0.0 BW0.1 F0.1 BW0.0", num_microbatches=2)
    assert draw_stuck(schedule, stuck_cycle(schedule)).splitlines()[0] == (
        "+-> rank 0:  F0.0 [BW0.1] (F0.1) BW0.0"
    )


@given(ordered_schedules)
def test_a_drawing_has_the_ranks_of_the_circle_and_nothing_without_one(schedule: Schedule) -> None:
    circle = stuck_cycle(schedule)
    text = draw_stuck(schedule, circle)
    assert (text == "") is (circle == ())
    for wait in circle:
        assert f"rank {wait.rank}:" in text
        assert f"cannot start {wait.action} before {wait.waits_for}" in text
        assert f"[{wait.action}]" in text or f"[({wait.action})]" in text
        assert f"({wait.waits_for})" in text
    assert text.count("|  cannot start") == len(circle)
