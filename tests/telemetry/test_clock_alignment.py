"""Clocks of ranks on one: what a gather tells of them, by hand, and how much it leaves open."""

from __future__ import annotations

import pytest

from echelon.core.event import Event
from echelon.telemetry.clock_alignment import align_clocks
from echelon.telemetry.recorded_steps import RecordedStep


def gather(rank: int, start: float, end: float) -> tuple[Event, ...]:
    return (
        Event(kind="all_gather", axis="world", name="step", rank=rank, start=start, end=end),
        Event(kind="step", name="1 a", rank=rank),
    )


def step_of(**times: tuple[float, float]) -> RecordedStep:
    """Return a step in which each rank is in the gather from one time to another."""
    events = {int(name[1:]): gather(int(name[1:]), *both) for name, both in times.items()}
    return RecordedStep(number=1, events=events, start=0)


def test_a_gather_bounds_each_clock_by_the_other() -> None:
    # Rank 1 began its clock 5 s later: 10 to 12 on rank 0 is 5.5 to 7 on its own.
    found = align_clocks([step_of(r0=(10.0, 12.0), r1=(5.5, 7.0))], [], [])
    # 10 <= 7 + o and 5.5 + o <= 12: o is in 3 to 6.5, of which the middle is taken.
    assert found.offset_s == {0: 0.0, 1: pytest.approx(4.75)}
    assert found.uncertainty_s == pytest.approx(1.75)


def test_a_later_step_tightens_the_bounds() -> None:
    steps = [step_of(r0=(10.0, 12.0), r1=(5.5, 7.0)), step_of(r0=(13.0, 13.1), r1=(8.0, 8.1))]
    found = align_clocks(steps, [], [])
    assert found.offset_s[1] == pytest.approx(5.0)
    assert found.uncertainty_s == pytest.approx(0.1)


def test_bounds_of_long_ago_are_left_out_for_clocks_drift() -> None:
    steps = [step_of(r0=(0.0, 0.1), r1=(0.0, 0.1)), step_of(r0=(13.0, 15.0), r1=(8.0, 10.0))]
    found = align_clocks(steps, [], [])
    assert found.offset_s[1] == pytest.approx(5.0)
    assert found.uncertainty_s == pytest.approx(2.0)
