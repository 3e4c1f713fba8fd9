"""Deadlock and rendezvous, against a machine that runs the messages one by one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from echelon.schedule.action import Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.deadlock import (
    draw_deadlock,
    find_deadlock,
    moves_that_break_deadlock,
    send_window,
    shares_queue,
)
from echelon.schedule.messages import ScheduleMessages, run_action_lists
from echelon.schedule.rows import ActionCells
from tests.schedule.examples import ordered_schedules, runnable_schedules, schedule_of
from tests.schedule.mutations import is_valid
from tests.schedule.transport import Machine


@given(ordered_schedules)
def test_a_circle_is_found_exactly_where_the_ranks_hang(schedule: Schedule) -> None:
    finishes = Machine(ScheduleMessages.from_schedule(schedule), buffered=True).finishes()
    assert (find_deadlock(schedule) == ()) is finishes


@given(ordered_schedules)
def test_rendezvous_hangs_exactly_where_buffered_sends_do(schedule: Schedule) -> None:
    finishes = Machine(ScheduleMessages.from_schedule(schedule)).finishes()
    assert (find_deadlock(schedule) == ()) is finishes


@given(ordered_schedules)
def test_the_circle_is_one_and_every_wait_in_it_is_real(schedule: Schedule) -> None:
    circle = find_deadlock(schedule)
    _, heads = run_action_lists(schedule)
    assert len({wait.rank for wait in circle}) == len(circle)
    for wait, following in zip(circle, circle[1:] + circle[:1], strict=True):
        row = schedule.actions[wait.rank]
        assert wait.awaited_rank == following.rank != wait.rank
        assert row[heads[wait.rank]] == wait.action
        maker = schedule.actions[wait.awaited_rank]
        assert maker.index(wait.awaited_action) >= heads[wait.awaited_rank]


@given(runnable_schedules)
def test_the_send_window_is_the_smallest_that_runs(schedule: Schedule) -> None:
    traffic = ScheduleMessages.from_schedule(schedule)
    window = send_window(traffic)
    assert Machine(traffic, window=window).finishes()
    assert window == 0 or not Machine(traffic, window=window - 1).finishes()


@given(runnable_schedules)
def test_sharing_a_queue_is_allowed_exactly_where_it_runs(schedule: Schedule) -> None:
    traffic = ScheduleMessages.from_schedule(schedule)
    assert shares_queue(traffic) is Machine(traffic, one_queue=True).finishes()


@pytest.mark.parametrize(
    ("name", "window", "shares"), [("naive", 0, True), ("gpipe", 0, True), ("1f1b", 1, False)]
)
def test_what_each_schedule_asks_of_its_transport(name: str, window: int, shares: bool) -> None:
    schedule = build_schedule(name, num_stages=4, num_ranks=4, num_microbatches=8)
    traffic = ScheduleMessages.from_schedule(schedule)
    assert (send_window(traffic), shares_queue(traffic)) == (window, shares)


def test_the_window_grows_where_a_rank_runs_far_ahead() -> None:
    ahead = " ".join(f"F0.{m}" for m in range(9)) + " " + " ".join(f"BW0.{m}" for m in range(9))
    after = " ".join(f"F1.{m} BW1.{m}" for m in range(9))
    traffic = ScheduleMessages.from_schedule(schedule_of(ahead, after, num_microbatches=9))
    assert send_window(traffic) == 4
    assert Machine(traffic, window=4).finishes()
    assert not Machine(traffic, window=3).finishes()


@given(ordered_schedules)
def test_a_move_that_is_named_frees_every_rank(schedule: Schedule) -> None:
    circle = find_deadlock(schedule)
    for text in moves_that_break_deadlock(schedule, circle):
        found = re.fullmatch(r"on rank (\d+) (\S+) before (\S+)", text)
        assert found is not None
        row = [str(action) for action in schedule.actions[int(found[1])]]
        row.remove(found[2])
        row.insert(row.index(found[3]), found[2])
        rows = [" ".join(map(str, actions)) for actions in schedule.actions]
        rows[int(found[1])] = " ".join(row)
        moved = schedule_of(
            *rows,
            num_microbatches=schedule.num_microbatches,
            stage_ranks=schedule.stage_ranks,
        )
        assert is_valid(moved)


def test_the_shortest_circle_is_named_where_more_ranks_hang() -> None:
    schedule = schedule_of(
        "F0.0 F0.1 BW0.0 BW0.1",
        "F1.0 BW1.0 F1.1 BW1.1",
        "F2.0 F2.1 BW2.0 BW2.1",
        num_microbatches=2,
    )
    circle = find_deadlock(schedule)
    assert sorted(wait.rank for wait in circle) == [1, 2]


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
    assert draw_deadlock(schedule, find_deadlock(schedule)) == "\n".join(drawn)


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
    cells = ActionCells(source="mine.csv", rows=("row 1", "row 2"), cells=names)
    lines = draw_deadlock(schedule, find_deadlock(schedule), cells).splitlines()
    assert lines[0] == "+-> rank 0:  ... F0.6 F0.7 [BW0.0] BW0.1 ... BW0.7 (F0.8) BW0.8"
    assert lines[1].endswith("cannot start BW0.0 (row 1, column 9) before BW1.0")
    assert lines[3] == "|   rank 1:  ... F1.6 F1.7 [F1.8] (BW1.0) BW1.1 ..."


def test_a_rank_that_waits_for_one_that_waits() -> None:
    schedule = schedule_of(
        "F2.0 F0.0 BW2.0 BW0.0", "F1.0 BW1.0", num_microbatches=1, stage_ranks=(0, 1, 0)
    )
    lines = draw_deadlock(schedule, find_deadlock(schedule)).splitlines()
    assert lines[0] == "+-> rank 0:  [F2.0] (F0.0) BW2.0 ..."
    assert lines[3] == "|   rank 1:  [(F1.0)] BW1.0"


def test_a_rank_may_wait_for_itself() -> None:
    schedule = schedule_of("F0.0 BW0.1 F0.1 BW0.0", num_microbatches=2)
    assert draw_deadlock(schedule, find_deadlock(schedule)).splitlines()[0] == (
        "+-> rank 0:  F0.0 [BW0.1] (F0.1) BW0.0"
    )


@given(ordered_schedules)
def test_a_drawing_has_the_ranks_of_the_circle_and_nothing_without_one(schedule: Schedule) -> None:
    circle = find_deadlock(schedule)
    text = draw_deadlock(schedule, circle)
    assert (text == "") is (circle == ())
    for wait in circle:
        assert f"rank {wait.rank}:" in text
        assert f"cannot start {wait.action} before {wait.awaited_action}" in text
        assert f"[{wait.action}]" in text or f"[({wait.action})]" in text
        assert f"({wait.awaited_action})" in text
    assert text.count("|  cannot start") == len(circle)
