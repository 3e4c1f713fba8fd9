"""What of a module is whole when: units in their turn, what is kept, everything at the end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from echelon.core.plan import Zero
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.module.gathering import (
    FirstStepTrace,
    GatherSchedule,
    UnitEvent,
    UnitOrder,
    agree_on_order,
)
from echelon.parallel.module.module import apply_to_module
from tests.parallel.layouts import plan_of
from tests.parallel.module.loops import (
    BLOCKS,
    SLICES,
    plan,
    run,
)
from tests.parallel.module.models import make
from tests.parallel.module.targets import Loop

STAGE_3 = Zero(stage=3)


@pytest.mark.parametrize("home", ["none", "host"])
def test_one_rank_alone_holds_slices_that_are_everything(home: Any) -> None:
    split = apply_to_module(plan_of(zero=replace(STAGE_3, parameter_offload=home)), make("nested"))
    split.gathering.make_all_whole()
    for name, value in make("nested").named_parameters():
        assert torch.equal(split.model.get_parameter(name), value)


def test_units_are_gathered_twice_or_once(rank_pool: RankPool) -> None:
    # Row E9: before forward and before backward, or once per step.
    for reshard, times in ((True, 2), (False, 1)):
        loop = Loop(plan=plan(replace(SLICES, reshard_after_forward=reshard)))
        for rank in run(rank_pool, loop):
            gathers = [e.name for e in rank.events[-1] if e.name.startswith("parameters.")]
            assert sorted({gathers.count(name) for name in gathers}) == sorted({1, times})


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_as_many_units_are_whole_as_are_gathered_ahead(rank_pool: RankPool, prefetch: int) -> None:
    # Rows E7 and E8: the largest unit and those ahead; gathers begin as much earlier.
    loop = Loop(plan=plan(replace(SLICES, prefetch=prefetch)))
    for rank in run(rank_pool, loop):
        assert rank.streamed == BLOCKS
        assert rank.most_whole == 1 + prefetch
        gathers = [event for event in rank.events[-1] if event.name.startswith("parameters.")]
        overlapping = sum(
            after.start < one.end for one, after in pairwise(gathers) if one.name != after.name
        )
        assert (overlapping > 4) is (prefetch > 0)


def use(*units: str) -> list[UnitEvent]:
    """Return the events of units that come one after the other."""
    events: list[UnitEvent] = []
    for unit in units:
        events.append(("enter", unit))
        events.append(("leave", unit))
    return events


def test_ranks_agree_on_what_all_of_them_do_alike() -> None:
    alike = FirstStepTrace(forwards=[use("a", "b", "c")] * 2, backwards=[use("c", "b", "a")])
    assert agree_on_order([alike, alike]) == UnitOrder(
        forward=tuple(use("a", "b", "c")), backward=tuple(use("c", "b", "a"))
    )
    without = FirstStepTrace(forwards=[use("a", "c")], backwards=[use("c", "a")])
    assert agree_on_order([alike, without]).units == {"a", "c"}
    swapped = FirstStepTrace(forwards=[use("b", "a", "c")], backwards=[use("c", "a", "b")])
    assert agree_on_order([alike, swapped]).units == {"c"}
    twice = FirstStepTrace(forwards=[use("a", "b", "a", "c")], backwards=[use("c", "b", "a")])
    assert agree_on_order([twice, twice]).units == {"b", "c"}
    odd = FirstStepTrace(forwards=alike.forwards, backwards=alike.backwards, irregular={"b"})
    assert agree_on_order([alike, odd]).units == {"a", "c"}
    nothing = agree_on_order([alike, FirstStepTrace()])
    assert (nothing.forward, nothing.backward) == ((), ())


def test_a_unit_without_backward_is_gathered_for_its_forward_only() -> None:
    noted = FirstStepTrace(forwards=[use("a", "b")], backwards=[[("enter", "b")]])
    order = agree_on_order([noted, noted])
    assert order.forward == tuple(use("a", "b"))
    assert order.backward == (("enter", "b"),)


USERS = {"A": ("a",), "B": ("b",), "C": ("c",), "AC": ("a", "c")}


def test_a_sweep_gathers_each_bucket_once_and_frees_it_after_its_last_unit() -> None:
    sweep = GatherSchedule(use("a", "b", "c"), USERS, ahead=1)
    turn = sweep.enter("a")
    assert (turn.gather, turn.after, turn.over) == (["A", "AC", "B"], ["C"], [])
    assert sweep.leave("a") == ["A"]
    assert sweep.enter("b").gather == ["C"]
    assert sweep.leave("b") == ["B"]
    assert sweep.enter("c").gather == []
    assert sorted(sweep.leave("c")) == ["AC", "C"]
    assert sweep.end() == ([], [])
    assert sweep.ends() == ["A", "B", "AC", "C"]


def test_a_sweep_takes_part_in_what_is_left_out() -> None:
    sweep = GatherSchedule(use("a", "b", "c"), USERS, ahead=0)
    turn = sweep.enter("c")
    assert (turn.skipped, turn.gather) == (["A", "B"], ["AC", "C"])
    assert sweep.passed("a")
    assert sweep.passed("b")
    assert sweep.end() == (["AC", "C"], [])
    assert not sweep.passed("a")
    assert sweep.end() == ([], ["A", "AC", "B", "C"])


def test_a_unit_around_another_is_whole_until_it_ends() -> None:
    events: list[UnitEvent] = [("enter", "o"), ("enter", "i"), ("leave", "i"), ("leave", "o")]
    sweep = GatherSchedule(events, {"O": ("o",), "I": ("i",)}, ahead=0)
    assert sweep.enter("o").gather == ["O"]
    assert sweep.enter("i").gather == ["I"]
    assert sweep.leave("i") == ["I"]
    assert sweep.leave("o") == ["O"]
