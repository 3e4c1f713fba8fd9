"""What of a module is whole when: units in their turn, what is kept, everything at the end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from echelon.core.plan import Zero
from echelon.launch.local.pool import RankPool
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
