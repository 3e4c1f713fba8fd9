"""DualPipeV: its order, and that it is half of DualPipe."""

from __future__ import annotations

import pytest

from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.dualpipe_v import DualPipeV
from tests.schedule.closed_forms import simulated, times_of
from tests.schedule.test_dualpipe import makespan_of_pairs


def _builder(p: int, m: int) -> DualPipeV:
    builder = builder_of("dualpipe-v", num_stages=2 * p, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, DualPipeV)
    return builder


def test_the_list_of_one_rank_has_both_stages() -> None:
    (row,) = _builder(1, 2).schedule().actions
    assert " ".join(map(str, row)) == "F0.0 F1.0 F0.1 BW1.0 F1.1 BW0.0 BW1.1 B0.1 W0.1"


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 7), (4, 9)])
def test_it_is_the_first_half_of_the_ranks_of_dualpipe(p: int, m: int) -> None:
    half = _builder(p, m).schedule()
    whole = build_schedule("dualpipe", num_stages=2 * p, num_ranks=2 * p, num_microbatches=2 * m)
    for rank, row in enumerate(half.actions):
        expected = [(a.kind, a.stage, a.microbatch % m) for a in whole.actions[rank]]
        assert [(a.kind, a.stage, a.microbatch) for a in row] == expected


@pytest.mark.system("B03")
@pytest.mark.parametrize("p", [1, 2, 5])
def test_the_bubble_of_the_paper_is_that_of_pairs_which_end_together(p: int) -> None:
    builder, times = _builder(p, 3 * p), times_of(3, 3, 1)
    bubble = (p - 1) * (7 + 4 - 3)
    assert builder.paper_bubble_s(times) == bubble
    pairs = makespan_of_pairs(builder.schedule(), times, times.total_s)
    assert pairs == builder.busy_s(times) + bubble
    assert simulated(builder, times).idle_s[0] == bubble - (p - 1) * 3


def test_a_rank_holds_one_half_stage_more_than_zb_v() -> None:
    builder = _builder(4, 16)
    other = builder_of("zb-v", num_stages=8, num_ranks=4, num_microbatches=16)
    for rank in range(4):
        assert builder.peak_in_flight_of_rank(rank) == other.peak_in_flight_of_rank(rank) + 1
