"""ZB-H1 and ZB-H2: their orders, the paper's bubbles, and what few microbatches leave of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.builders.zero_bubble import ZeroBubbleH1, ZeroBubbleH2, ZeroBubbleV
from tests.schedule.closed_forms import closed_form_holds, longest_wait_inside, simulated, times_of

seconds = st.integers(1, 9)


def _h1(p: int, m: int) -> ZeroBubbleH1:
    builder = builder_of("zb-h1", num_stages=p, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, ZeroBubbleH1)
    return builder


def test_of_h1_each_later_rank_leaves_one_more_w_for_the_end() -> None:
    schedule = build_schedule("zb-h1", num_stages=3, num_ranks=3, num_microbatches=4)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 W1.0 F1.3 B1.2 W1.1 B1.3 W1.2 W1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 W2.0 F2.3 B2.3 W2.1 W2.2 W2.3",
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 24)])
def test_h1_has_a_third_of_the_bubble_of_1f1b_and_its_peak(p: int, m: int) -> None:
    builder = _h1(p, m)
    f1b = builder_of("1f1b", num_stages=p, num_ranks=p, num_microbatches=m)
    assert 3 * simulated(builder).idle_s[0] == simulated(f1b).idle_s[0]
    ranks = range(p)
    assert {builder.peak_in_flight_of_rank(rank) for rank in ranks} == {f1b.peak_in_flight(0)}


@pytest.mark.system("B02")
@given(st.integers(2, 6), st.integers(0, 12), seconds, seconds, seconds)
def test_the_bubble_of_the_paper_of_h1(p: int, extra: int, forward: int, b: int, w: int) -> None:
    builder, times = _h1(p, p + extra), times_of(forward, b, w)
    result = simulated(builder, times)
    if forward >= w:
        assert builder.paper_bubble_s(times) == (p - 1) * (forward + b - w)
        assert longest_wait_inside(result) == builder.paper_bubble_s(times)
        if b >= w:
            assert builder.idle_s(times) == builder.paper_bubble_s(times)
    else:
        assert longest_wait_inside(result) > builder.paper_bubble_s(times)


def _h2(p: int, m: int) -> ZeroBubbleH2:
    builder = builder_of("zb-h2", num_stages=p, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, ZeroBubbleH2)
    return builder


def test_of_h2_more_forward_passes_fill_the_wait_for_the_first_gradient() -> None:
    schedule = build_schedule("zb-h2", num_stages=2, num_ranks=2, num_microbatches=4)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 W1.0 F1.3 B1.3 W1.1 W1.2 W1.3",
    ]


def test_with_p_microbatches_h2_is_h1() -> None:
    h1, h2 = (
        build_schedule(name, num_stages=5, num_ranks=5, num_microbatches=5)
        for name in ("zb-h1", "zb-h2")
    )
    assert h1.actions == h2.actions


@pytest.mark.parametrize("p", [2, 3, 8])
def test_in_h2_no_rank_waits_inside_from_2p_minus_1_microbatches_on(p: int) -> None:
    for m in range(p, 3 * p):
        result = simulated(_h2(p, m))
        assert longest_wait_inside(result) == max(0, 2 * p - 1 - m)
        assert result.idle_s == (p - 1,) * p


@given(st.integers(2, 6), st.integers(0, 9), seconds, seconds, seconds)
def test_the_bubble_of_the_paper_of_h2(p: int, extra: int, forward: int, b: int, w: int) -> None:
    builder, times = _h2(p, 2 * p - 1 + extra), times_of(forward, b, w)
    wait = longest_wait_inside(simulated(builder, times))
    assert builder.paper_bubble_s(times) == (p - 1) * (forward + b - 2 * w)
    if forward >= w and forward + b >= 2 * w:
        assert wait == builder.paper_bubble_s(times)
    assert wait == (p - 1) * max(0, b - forward, forward + b - 2 * w)


def _builder(p: int, m: int) -> ZeroBubbleV:
    builder = builder_of("zb-v", num_stages=2 * p, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, ZeroBubbleV)
    return builder


def test_the_list_of_two_ranks() -> None:
    schedule = build_schedule("zb-v", num_stages=4, num_ranks=2, num_microbatches=3)
    assert schedule.stage_ranks == (0, 1, 1, 0)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 B3.1 W3.1 B0.0 W0.0 F3.2 B3.2 W3.2 B0.1 W0.1 B0.2 W0.2",
        "F1.0 F2.0 F1.1 F2.1 B2.0 W2.0 F1.2 B1.0 W1.0 F2.2 B2.1 W2.1 B1.1 B2.2 B1.2 W1.1 W2.2 W1.2",
    ]


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_no_rank_waits_inside_from_2p_minus_1_microbatches_on(p: int) -> None:
    for m in range(p, 3 * p):
        builder = _builder(p, m)
        result = simulated(builder)
        assert longest_wait_inside(result) == 2 * max(0, 2 * p - 1 - m)
        assert builder.paper_bubble_s() == 0


@pytest.mark.system("B02")
def test_the_step_takes_p_minus_1_forward_passes_of_half_a_rank_more_than_the_work() -> None:
    result = simulated(_builder(4, 8))
    assert result.makespan_s == 2 * 8 * 3 + 3


def test_a_rank_holds_p_whole_microbatches_as_1f1b_does() -> None:
    builder = _builder(4, 16)
    f1b = builder_of("1f1b", num_stages=4, num_ranks=4, num_microbatches=16)
    assert {builder.peak_in_flight_of_rank(rank) for rank in range(4)} == {
        2 * f1b.peak_in_flight(0)
    }


def test_where_the_closed_form_is_not_claimed() -> None:
    uneven = times_of(1, 2, 1)
    assert not closed_form_holds(_builder(4, 6), uneven)
    assert closed_form_holds(_builder(4, 6))
    assert closed_form_holds(_builder(4, 7), uneven)


def test_the_ends_of_the_model_are_on_the_same_rank() -> None:
    schedule = _builder(4, 8).schedule()
    assert schedule.stages_of(0) == (0, 7)
    assert schedule.stages_of(3) == (3, 4)
    assert _builder(4, 8).num_messages() == 2 * 8 * 6
