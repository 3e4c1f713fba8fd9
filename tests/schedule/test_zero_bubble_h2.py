"""ZB-H2: its order, the paper's bubble, and what few microbatches leave of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.zero_bubble_h2 import ZeroBubbleH2
from tests.schedule.closed_forms import longest_wait_inside, simulated, times_of

seconds = st.integers(1, 9)


def _builder(p: int, m: int) -> ZeroBubbleH2:
    builder = builder_of("zb-h2", num_stages=p, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, ZeroBubbleH2)
    return builder


def test_more_forward_passes_fill_the_wait_for_the_first_gradient() -> None:
    schedule = build_schedule("zb-h2", num_stages=2, num_ranks=2, num_microbatches=4)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 W1.0 F1.3 B1.3 W1.1 W1.2 W1.3",
    ]


def test_with_p_microbatches_it_is_zb_h1() -> None:
    h1, h2 = (
        build_schedule(name, num_stages=5, num_ranks=5, num_microbatches=5)
        for name in ("zb-h1", "zb-h2")
    )
    assert h1.actions == h2.actions


@pytest.mark.parametrize("p", [2, 3, 8])
def test_no_rank_waits_inside_from_2p_minus_1_microbatches_on(p: int) -> None:
    for m in range(p, 3 * p):
        result = simulated(_builder(p, m))
        assert longest_wait_inside(result) == max(0, 2 * p - 1 - m)
        assert result.idle_s == (p - 1,) * p


@given(st.integers(2, 6), st.integers(0, 9), seconds, seconds, seconds)
def test_the_bubble_of_the_paper(p: int, extra: int, forward: int, b: int, w: int) -> None:
    builder, times = _builder(p, 2 * p - 1 + extra), times_of(forward, b, w)
    wait = longest_wait_inside(simulated(builder, times))
    assert builder.paper_bubble_s(times) == (p - 1) * (forward + b - 2 * w)
    assert builder.paper_bubble_holds(times) == (forward >= w and forward + b >= 2 * w)
    assert builder.paper_bubble_holds(times) <= (wait == builder.paper_bubble_s(times))
    assert wait == (p - 1) * max(0, b - forward, forward + b - 2 * w)
    assert not _builder(p, 2 * p - 2).paper_bubble_holds(times)
