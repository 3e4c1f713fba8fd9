"""The timeline in text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.event import Event
from echelon.schedule.action import Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.draw import draw_timeline
from echelon.schedule.simulate import Durations, simulate
from tests.schedule.examples import runnable_schedules, schedule_of


def _drawn(schedule: Schedule, width: int, **durations: float) -> list[str]:
    times = Durations.uniform(schedule.num_stages, **durations)
    return draw_timeline(simulate(schedule, times).events, width).splitlines()


@pytest.mark.system("S20")
def test_gpipe_and_1f1b_fill_14_slots() -> None:
    width = len("rank 0  ") + 14 * 3
    gpipe, f1b = (
        _drawn(
            build_schedule(name, num_stages=4, num_ranks=4, num_microbatches=4),
            width,
            backward_s=1,
        )
        for name in ("gpipe", "1f1b")
    )
    assert gpipe == [
        "rank 0  F0-F1-F2-F3-..................B0=B1=B2=B3=",
        "rank 1  ...F0-F1-F2-F3-............B0=B1=B2=B3=...",
        "rank 2  ......F0-F1-F2-F3-......B0=B1=B2=B3=......",
        "rank 3  .........F0-F1-F2-F3-B0=B1=B2=B3=.........",
        "        0                                     14 s",
    ]
    assert f1b[:4] == [
        "rank 0  F0-F1-F2-F3-.........B0=...B1=...B2=...B3=",
        "rank 1  ...F0-F1-F2-......B0=F3-B1=...B2=...B3=...",
        "rank 2  ......F0-F1-...B0=F2-B1=F3-B2=...B3=......",
        "rank 3  .........F0-B0=F1-B1=F2-B2=F3-B3=.........",
    ]


def test_transfers_stand_in_a_row_of_their_own() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=1)
    assert _drawn(schedule, 8 + 20, backward_s=2, transfer_s=2) == [
        "rank 0  F0..............B0==",
        "  pp    ..>>>>..............",
        "rank 1  ......F0B0==........",
        "  pp    ............<<<<....",
        "        0               10 s",
    ]


def test_split_backward_and_several_stages_per_rank_are_named() -> None:
    schedule = schedule_of("F0.0 F1.0 B1.0 B0.0 W1.0 W0.0", num_microbatches=1, stage_ranks=(0, 0))
    assert _drawn(schedule, 8 + 24, forward_s=1, backward_s=2)[0] == (
        "rank 0  F0.0F1.0B1.0B0.0W1.0W0.0"
    )
    assert _drawn(schedule, 8 + 36, forward_s=1, backward_s=2)[0] == (
        "rank 0  F0.0--F1.0--B1.0~~B0.0~~W1.0++W0.0++"
    )


def test_a_narrow_cell_keeps_its_microbatch_and_then_its_fill() -> None:
    schedule = schedule_of("F0.0 F0.1 BW0.0 BW0.1", num_microbatches=2)
    assert _drawn(schedule, 8 + 10, forward_s=1, backward_s=4)[0] == "rank 0  01B0==B1=="
    rows = " ".join(f"F0.{m}" for m in range(12)) + " " + " ".join(f"BW0.{m}" for m in range(12))
    assert _drawn(schedule_of(rows, num_microbatches=12), 8 + 24, forward_s=1, backward_s=1)[0] == (
        "rank 0  0123456789--0123456789=="
    )


def test_measured_events_need_not_start_at_zero() -> None:
    events = [
        Event(kind="F", name="F0.0", stage=0, microbatch=0, start=100.0, end=101.0),
        Event(kind="all_reduce", name="bucket 0", axis="dp_shard", start=101.0, end=102.0),
        Event(kind="all_reduce", name="norm", axis="pp", start=102.0, end=102.0),
        Event(kind="step", name="step 3", start=0.0, end=200.0),
    ]
    assert draw_timeline(events, 12 + 10).splitlines() == [
        "rank 0      F0---.....",
        "  dp_shard  .....#####",
        "            0      2 s",
    ]


@pytest.mark.parametrize("events", [[], [Event(kind="step", name="step 0", end=1.0)]])
def test_nothing_to_draw_is_said(events: list[Event]) -> None:
    assert draw_timeline(events) == "(no events)\n"


def test_events_without_duration_still_draw() -> None:
    event = Event(kind="F", name="F0.0", stage=0, microbatch=0)
    assert draw_timeline([event], 20) == "rank 0  ............\n        0        0 s\n"


@given(runnable_schedules, st.integers(30, 200))
def test_every_rank_has_a_row_and_every_row_the_width(schedule: Schedule, width: int) -> None:
    lines = _drawn(schedule, width, transfer_s=0.5)
    assert {len(line) for line in lines} == {width}
    titles = [line.split("  ")[0] for line in lines if line.startswith("rank")]
    assert titles == [f"rank {rank}" for rank in range(schedule.num_ranks)]
