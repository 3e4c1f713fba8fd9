"""Breadth-first: its order, and what it holds."""

from __future__ import annotations

from echelon.schedule.build import build_schedule, builder_of
from tests.schedule.closed_forms import simulated


def test_all_microbatches_cross_a_stage_before_the_next_stage_of_the_rank() -> None:
    schedule = build_schedule("breadth-first", num_stages=4, num_ranks=2, num_microbatches=2)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F0.1 F2.0 F2.1 BW2.0 BW2.1 BW0.0 BW0.1",
        "F1.0 F1.1 F3.0 F3.1 BW3.0 BW3.1 BW1.0 BW1.1",
    ]


def test_a_rank_goes_through_its_stages_once_in_each_direction() -> None:
    schedule = build_schedule("breadth-first", num_stages=12, num_ranks=4, num_microbatches=9)
    for rank, row in enumerate(schedule.actions):
        order = list(dict.fromkeys((action.kind.value, action.stage) for action in row))
        stages = [rank, rank + 4, rank + 8]
        assert order == [("F", s) for s in stages] + [("BW", s) for s in reversed(stages)]


def test_the_bubble_is_that_of_interleaving_and_the_memory_that_of_gpipe() -> None:
    builder = builder_of("breadth-first", num_stages=8, num_ranks=4, num_microbatches=8)
    assert builder.bubble_overhead() == simulated(builder).bubble_overhead == 3 / 16
    assert builder.peak_in_flight_of_rank(0) == 16
