"""Deadlock and rendezvous, against a machine that runs the messages one by one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from echelon.schedule.action import Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.deadlock import moves_that_finish, send_window, shares_queue, stuck_cycle
from echelon.schedule.dependencies import run_lists
from echelon.schedule.messages import Traffic
from tests.schedule.examples import ordered_schedules, runnable_schedules, schedule_of
from tests.schedule.mutations import is_valid
from tests.schedule.transport import Machine


@given(ordered_schedules)
def test_a_circle_is_found_exactly_where_the_ranks_hang(schedule: Schedule) -> None:
    finishes = Machine(Traffic.of(schedule), buffered=True).finishes()
    assert (stuck_cycle(schedule) == ()) is finishes


@given(ordered_schedules)
def test_rendezvous_hangs_exactly_where_buffered_sends_do(schedule: Schedule) -> None:
    finishes = Machine(Traffic.of(schedule)).finishes()
    assert (stuck_cycle(schedule) == ()) is finishes


@given(ordered_schedules)
def test_the_circle_is_one_and_every_wait_in_it_is_real(schedule: Schedule) -> None:
    circle = stuck_cycle(schedule)
    heads = run_lists(schedule).heads
    assert len({wait.rank for wait in circle}) == len(circle)
    for wait, following in zip(circle, circle[1:] + circle[:1], strict=True):
        row = schedule.actions[wait.rank]
        assert wait.on_rank == following.rank != wait.rank
        assert row[heads[wait.rank]] == wait.action
        maker = schedule.actions[wait.on_rank]
        assert maker.index(wait.waits_for) >= heads[wait.on_rank]


@given(runnable_schedules)
def test_the_send_window_is_the_smallest_that_runs(schedule: Schedule) -> None:
    traffic = Traffic.of(schedule)
    window = send_window(traffic)
    assert Machine(traffic, window=window).finishes()
    assert window == 0 or not Machine(traffic, window=window - 1).finishes()


@given(runnable_schedules)
def test_sharing_a_queue_is_allowed_exactly_where_it_runs(schedule: Schedule) -> None:
    traffic = Traffic.of(schedule)
    assert shares_queue(traffic) is Machine(traffic, one_queue=True).finishes()


@pytest.mark.parametrize(
    ("name", "window", "shares"), [("naive", 0, True), ("gpipe", 0, True), ("1f1b", 1, False)]
)
def test_what_each_schedule_asks_of_its_transport(name: str, window: int, shares: bool) -> None:
    schedule = build_schedule(name, num_stages=4, num_ranks=4, num_microbatches=8)
    traffic = Traffic.of(schedule)
    assert (send_window(traffic), shares_queue(traffic)) == (window, shares)


def test_the_window_grows_where_a_rank_runs_far_ahead() -> None:
    ahead = " ".join(f"F0.{m}" for m in range(9)) + " " + " ".join(f"BW0.{m}" for m in range(9))
    after = " ".join(f"F1.{m} BW1.{m}" for m in range(9))
    traffic = Traffic.of(schedule_of(ahead, after, num_microbatches=9))
    assert send_window(traffic) == 4
    assert Machine(traffic, window=4).finishes()
    assert not Machine(traffic, window=3).finishes()


@given(ordered_schedules)
def test_a_move_that_is_named_frees_every_rank(schedule: Schedule) -> None:
    circle = stuck_cycle(schedule)
    for text in moves_that_finish(schedule, circle):
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
    circle = stuck_cycle(schedule)
    assert sorted(wait.rank for wait in circle) == [1, 2]
