"""Every builder: the simulator and the checker give exactly what its closed forms say."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.schedule.action import ActionKind
from echelon.schedule.build import SCHEDULES, builder_of
from echelon.schedule.builders.builder import EQUAL_TIMES, Builder
from echelon.schedule.check import check_schedule
from tests.schedule.closed_forms import builders, differences, some_times, times_of
from tests.walks import examples, shortened

NAMES = sorted(SCHEDULES)


@st.composite
def some_builders(draw: st.DrawFn) -> Builder:
    """Draw a schedule with any numbers that it allows, up to 7 ranks and 3 stages on each."""
    kind = SCHEDULES[draw(st.sampled_from(NAMES))]
    p = draw(st.integers(1, 7).filter(kind.fits_ranks))
    virtual = draw(st.integers(1, 3).filter(kind.fits_virtual_stages))
    extra = draw(st.integers(0, 3 * p))
    m = kind.minimum_microbatches(p) + extra * kind.microbatch_multiple
    return builder_of(
        kind.name, num_stages=kind.stages_for(p, virtual), num_ranks=p, num_microbatches=m
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("p", shortened(range(2, 17), lambda p: p <= 7))
def test_the_simulator_gives_the_closed_forms_exactly(p: int) -> None:
    seen: set[str] = set()
    for m in (p, p + 1, 2 * p, 3 * p + 1, 8 * p):
        for builder in builders(p, m, (1, 2)):
            seen.add(builder.name)
            times = some_times(p + m, int(m == 2 * p))
            assert list(differences(builder, times, proves=m == 2 * p)) == []
    assert seen == {name for name, kind in SCHEDULES.items() if kind.fits_ranks(p)}


seconds = st.integers(1, 20)


@settings(max_examples=examples(60))
@given(some_builders(), seconds, seconds, seconds)
def test_the_closed_forms_hold_for_any_times(
    builder: Builder, forward: int, input_gradient: int, weight_gradient: int
) -> None:
    times = times_of(forward, input_gradient, weight_gradient)
    assert list(differences(builder, [EQUAL_TIMES, times])) == []


@given(some_builders())
def test_a_rank_adds_up_the_gradients_of_a_stage_in_the_order_of_its_microbatches(
    builder: Builder,
) -> None:
    schedule = builder.schedule()
    for row in schedule.actions:
        order: dict[int, list[int]] = defaultdict(list)
        for action in row:
            if action.kind in (ActionKind.W, ActionKind.BW):
                order[action.stage].append(action.microbatch)
        assert all(microbatches == sorted(microbatches) for microbatches in order.values())


@settings(max_examples=examples(40))
@given(some_builders())
def test_messages_are_used_in_the_order_in_which_they_are_sent(builder: Builder) -> None:
    """Except where activations and gradients share a channel, as in a V or in two directions.

    Of two ranks with several stages each, both are the next one and the one before.
    """
    in_order = check_schedule(builder.schedule()).consumes_in_order
    shared = builder.name in ("zb-v", "dualpipe", "dualpipe-v")
    assert in_order or shared or (builder.num_ranks == 2 < builder.num_stages)


@given(some_builders())
def test_the_owners_are_those_of_the_schedule(builder: Builder) -> None:
    schedule = builder.schedule()
    virtual, rest = divmod(builder.num_stages, builder.num_ranks)
    assert rest == 0
    assert schedule.stage_ranks == type(builder).owners(builder.num_stages, builder.num_ranks)
    assert type(builder).stages_for(builder.num_ranks, virtual) == builder.num_stages
    held = {len(schedule.stages_of(rank)) for rank in range(builder.num_ranks)}
    assert held == {2 if builder.mirrored() else virtual}


@pytest.mark.parametrize("name", NAMES)
def test_a_builder_fits_the_virtual_stages_that_it_takes_by_itself(name: str) -> None:
    kind = SCHEDULES[name]
    assert kind.fits_virtual_stages(kind.default_virtual_stages)
    assert kind.fits_stages(kind.stages_for(4, kind.default_virtual_stages), 4)
    assert not kind.fits_stages(0, 0)


def test_action_times_add_up() -> None:
    times = times_of(2, 3, 4)
    assert (times.backward_s, times.total_s) == (7, 9)
    assert EQUAL_TIMES.backward_s == 2 * EQUAL_TIMES.forward_s
