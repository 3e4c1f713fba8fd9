# SPDX-License-Identifier: Apache-2.0
"""Gathers and sums that round: what changes numbers is never chosen by a search, but may be pinned.

With `zero.gather` or `zero.reduce` pinned every way to share out is looked at with each of the
values that the pins let through, where it can be had; without such a pin nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import cast

from echelon.config.schema import SETTINGS
from echelon.core.plan import Plan, Precision, ReduceKind
from echelon.cost.seconds.from_plan import gathered_weight_bytes, summed_weight_bytes
from echelon.planner.search.pins import Pins

_DEFAULT_BLOCK = cast("int", SETTINGS["zero.int8_block"].default)
EXACT_GATHER, EXACT_SUM = "parameters", "exact"
INT8 = "int8"
BLOCK_KEY = "zero.int8_block"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Say how parameters are gathered, and how gradients are summed into slices.

    `int8_block` is 0 where no matrix is rounded; the others are fields of `LayoutNumbers`.
    """

    gather: str = EXACT_GATHER
    int8_block: int = 0
    reduce: str = EXACT_SUM
    gathered_bytes: float = 0.0
    gathers_ends: float = 0.0
    summed_bytes: float = 0.0

    def settings(self) -> dict[str, object]:
        """Return the settings that say it; none where nothing is rounded."""
        found: dict[str, object] = {}
        if self.gather != EXACT_GATHER:
            found["zero.gather"] = self.gather
        if self.int8_block:
            found[BLOCK_KEY] = self.int8_block
        if self.reduce != EXACT_SUM:
            found["zero.reduce"] = self.reduce
        return found


EXACT = Rounding()
ROUNDED_NUMBERS = ("gathered_bytes", "gathers_ends", "summed_bytes")
"""Fields of `LayoutNumbers` that say how a plan rounds."""


def rounding_options(pins: Pins, precision: Precision) -> tuple[Rounding, ...]:
    """Return the ways to round that pins let through; nothing is rounded where none says so."""
    gathers = pins.values_of("gather") or (EXACT_GATHER,)
    blocks = pins.values_of("int8_block") or (_DEFAULT_BLOCK,)
    sums = pins.values_of("reduce") or (EXACT_SUM,)
    kinds = [
        (str(gather), int(block) if gather == INT8 else 0)
        for gather, block in product(gathers, blocks)
    ]
    return tuple(
        rounding_of(gather, block, str(reduce), precision)
        for (gather, block), reduce in product(dict.fromkeys(kinds), sums)
    )


def rounding_of_plan(plan: Plan) -> Rounding:
    """Return how a plan rounds."""
    zero, precision = plan.layout.zero, plan.mathematics.precision
    return rounding_of(zero.gather, precision.int8_block, zero.reduce, precision)


def rounding_of(gather: str, block: int, reduce: str, precision: Precision) -> Rounding:
    """Return one way to round, with the bytes that a weight of a block is sent in."""
    kind = cast("ReduceKind", reduce)
    return Rounding(
        gather=gather,
        int8_block=block,
        reduce=reduce,
        gathered_bytes=0.0
        if gather == EXACT_GATHER
        else gathered_weight_bytes(precision, int8_block=block),
        gathers_ends=float(gather == INT8),
        summed_bytes=summed_weight_bytes(kind, precision),
    )
