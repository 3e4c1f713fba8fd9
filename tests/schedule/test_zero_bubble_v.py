"""ZB-V: its order, no wait inside a rank, 1F1B's memory."""

from __future__ import annotations

import pytest

from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.zero_bubble_v import ZeroBubbleV
from tests.schedule.closed_forms import longest_wait_inside, simulated, times_of


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
    assert not _builder(4, 6).closed_form_holds(uneven)
    assert _builder(4, 6).closed_form_holds()
    assert _builder(4, 7).closed_form_holds(uneven)


def test_the_ends_of_the_model_are_on_the_same_rank() -> None:
    schedule = _builder(4, 8).schedule()
    assert schedule.stages_of(0) == (0, 7)
    assert schedule.stages_of(3) == (3, 4)
    assert _builder(4, 8).num_messages() == 2 * 8 * 6
