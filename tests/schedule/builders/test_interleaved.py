"""Interleaved 1F1B: its order, its groups, and Megatron's case."""

from __future__ import annotations

import pytest

from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.builders.interleaved import Interleaved
from tests.schedule.closed_forms import simulated


def _builder(p: int, v: int, m: int) -> Interleaved:
    builder = builder_of("interleaved-1f1b", num_stages=p * v, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, Interleaved)
    return builder


def test_the_list_of_two_ranks_with_two_stages_each() -> None:
    schedule = build_schedule("interleaved-1f1b", num_stages=4, num_ranks=2, num_microbatches=2)
    assert schedule.stage_ranks == (0, 1, 0, 1)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F0.1 F2.0 F2.1 BW2.0 BW2.1 BW0.0 BW0.1",
        "F1.0 F1.1 F3.0 BW3.0 F3.1 BW3.1 BW1.0 BW1.1",
    ]


@pytest.mark.parametrize(
    ("p", "m", "groups"),
    [(4, 4, (4,)), (4, 12, (4, 4, 4)), (4, 13, (5, 4, 4)), (4, 7, (7,)), (4, 15, (5, 5, 5))],
)
def test_groups_have_at_least_p_microbatches_and_are_as_equal_as_they_can_be(
    p: int, m: int, groups: tuple[int, ...]
) -> None:
    assert _builder(p, 2, m).groups() == groups


@pytest.mark.system("B01")
@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 2, 13), (8, 4, 16), (3, 5, 10)])
def test_the_bubble_shrinks_by_the_stages_of_a_rank(p: int, v: int, m: int) -> None:
    builder = _builder(p, v, m)
    assert builder.bubble_overhead() == simulated(builder).bubble_overhead == (p - 1) / (v * m)


def test_a_rank_warms_up_as_in_the_paper_where_p_divides_m() -> None:
    builder = _builder(4, 2, 16)
    for rank, row in enumerate(builder.schedule().actions):
        warm_up = next(place for place, action in enumerate(row) if action.kind == "BW") - 1
        assert warm_up == 2 * (4 - rank - 1) + (2 - 1) * 4
        assert builder.peak_in_flight_of_rank(rank) == warm_up + 1


@pytest.mark.system("B01")
def test_there_are_as_many_times_more_messages_as_stages_on_a_rank() -> None:
    assert _builder(4, 1 + 1, 8).num_messages() == 2 * 8 * (2 * 4 - 1)


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
