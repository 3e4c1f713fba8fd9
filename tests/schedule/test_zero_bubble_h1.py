"""ZB-H1: its order, the paper's bubble, 1F1B's memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.zero_bubble_h1 import ZeroBubbleH1
from tests.schedule.closed_forms import longest_wait_inside, simulated, times_of

seconds = st.integers(1, 9)


def _builder(p: int, m: int) -> ZeroBubbleH1:
    builder = builder_of("zb-h1", num_stages=p, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, ZeroBubbleH1)
    return builder


def test_each_later_rank_leaves_one_more_w_for_the_end() -> None:
    schedule = build_schedule("zb-h1", num_stages=3, num_ranks=3, num_microbatches=4)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 W1.0 F1.3 B1.2 W1.1 B1.3 W1.2 W1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 W2.0 F2.3 B2.3 W2.1 W2.2 W2.3",
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 24)])
def test_it_has_a_third_of_the_bubble_of_1f1b_and_its_peak(p: int, m: int) -> None:
    builder = _builder(p, m)
    f1b = builder_of("1f1b", num_stages=p, num_ranks=p, num_microbatches=m)
    assert 3 * simulated(builder).idle_s[0] == simulated(f1b).idle_s[0]
    ranks = range(p)
    assert {builder.peak_in_flight_of_rank(rank) for rank in ranks} == {f1b.peak_in_flight(0)}


@given(st.integers(2, 6), st.integers(0, 12), seconds, seconds, seconds)
def test_the_bubble_of_the_paper(p: int, extra: int, forward: int, b: int, w: int) -> None:
    builder, times = _builder(p, p + extra), times_of(forward, b, w)
    result = simulated(builder, times)
    if forward >= w:
        assert builder.paper_bubble_holds(times)
        assert builder.paper_bubble_s(times) == (p - 1) * (forward + b - w)
        assert longest_wait_inside(result) == builder.paper_bubble_s(times)
        if b >= w:
            assert builder.idle_s(times) == builder.paper_bubble_s(times)
    else:
        assert not builder.paper_bubble_holds(times)
        assert longest_wait_inside(result) > builder.paper_bubble_s(times)
