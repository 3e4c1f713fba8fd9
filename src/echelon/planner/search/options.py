# SPDX-License-Identifier: Apache-2.0
"""Choices that a mesh leaves open: ZeRO, rounding, the order of a pipeline, recompute.

Each list is small and the same for many rows, so
it is made once for what it depends on. Optimizer state rests on the device: what offload costs is
known for an assumed link of the host (`cost/seconds/data.py`). It is tried where it is pinned, and
where nothing fits without it. Secondary slices are tried wherever ZeRO 3 crosses nodes that hold
several ranks each; gathers and sums that round, where they are pinned only.

Left out, because it cannot be better in either time or memory than another choice with the same
rest (`tests/planner/search/test_sweep.py` compares with a search that leaves nothing out):

    gpipe          where 1f1b is legal: as much waiting, more in flight
    breadth-first  where it is not pinned: as much waiting as interleaved, more in flight

Of dualpipe a rank holds two stages, whose weights the closed forms count once: only where pinned,
too.

Gathers and sums that round change numbers: with `zero.gather` or `zero.reduce` pinned every way to
share out is tried with each of the values that the pins let through, where it can be had.

Recompute (`recompute_options`): a set of operators leaves out bytes for seconds, by the formulas of
`cost/` for a block of the model on one device. Of all sets with every number of blocks those are
tried that keep less than each one that takes no longer: norms and activations come first, attention
early in short sequences and late in long ones, where whole blocks and MLPs are cheaper for what
they free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil
from typing import NamedTuple, cast

import numpy as np

from echelon.config.schema import SETTINGS
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan, Precision, RecomputedOperator, ReduceKind
from echelon.core.rules import nearest_divisors
from echelon.cost.activations.closed_forms import bytes_of_block
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import LayoutNumbers, MachineNumbers, first_number, stacked_layouts
from echelon.cost.inputs.pipeline import schedule_index
from echelon.cost.seconds.block import block_seconds
from echelon.cost.seconds.from_plan import (
    adapted_model_numbers,
    gathered_weight_bytes,
    summed_weight_bytes,
)
from echelon.planner.search.pins import MOST_RECOMPUTE_INTERVAL, SELECTIVE, Pins, recompute_of_pin
from echelon.planner.search.request import SearchRequest
from echelon.schedule.build import PLAIN_SCHEDULE, SCHEDULES

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


LESS = 0.025
"""Share of what a block keeps by which the next choice keeps less at the least."""


class RecomputeOption(NamedTuple):
    """Say every how many blocks one runs again, their share, and which operators of the others."""

    every: int
    share: float
    operators: tuple[RecomputedOperator, ...] = ()

    @property
    def numbers(self) -> dict[str, float]:
        """Return the fields of `LayoutNumbers` that say it."""
        return {"recompute": self.share, **redone_numbers(self.operators)}


def redone_numbers(operators: Sequence[RecomputedOperator]) -> dict[str, float]:
    """Return which operators run again as fields of `LayoutNumbers`."""
    names: tuple[RecomputedOperator, ...] = ("norm", "activation", "mlp")
    found = {f"redone_{name}": float(name in operators) for name in names}
    return {**found, "selective": float("attention" in operators)}


def recompute_options(request: SearchRequest) -> tuple[RecomputeOption, ...]:
    """Return what may run again, least work first; each keeps less than the one before."""
    layers, wanted = request.model.layers, request.pins.values_of("recompute")
    block = _Block(
        model=request.model,
        length=request.mathematics.sequence_length,
        # How much memory there is changes nothing here.
        machine=replace(request.machine_numbers(1), memory_bytes=0.0),
        software=request.software,
    )
    worth = _worth_trying(block)
    if wanted is None:
        return worth
    found: dict[RecomputeOption, None] = {}
    for one in wanted:
        if one == SELECTIVE:
            found |= {option: None for option in worth if option.operators and not option.every}
            continue
        every, operators = recompute_of_pin(one)
        if every <= layers:
            found[_option(layers, every, operators)] = None
    return _leaner_and_leaner(block, [*found])


def operator_options(request: SearchRequest) -> tuple[RecomputeOption, ...]:
    """Return the operators alone that may run again, least work first; none for other trainers."""
    return tuple(one for one in recompute_options(request) if one.operators and not one.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Give what decides the bytes and seconds of a block on one device."""

    model: ModelShape
    length: int
    machine: MachineNumbers
    software: TrainerConstants


def _option(
    layers: int, every: int, operators: tuple[RecomputedOperator, ...] = ()
) -> RecomputeOption:
    share = ceil(layers / every) / layers if every else 0.0
    return RecomputeOption(every, share, operators if every != 1 else ())


@lru_cache(maxsize=64)
def _worth_trying(block: _Block) -> tuple[RecomputeOption, ...]:
    """Return the choices that keep less than all that take no longer."""
    layers = block.model.layers
    intervals = (0, *range(min(MOST_RECOMPUTE_INTERVAL, layers), 0, -1))
    found = {
        _option(layers, every, operators): None
        for operators in _operator_sets(block.model)
        for every in intervals
    }
    return _leaner_and_leaner(block, [*found], less=LESS)


def _leaner_and_leaner(
    block: _Block, options: Sequence[RecomputeOption], *, less: float = 0.0
) -> tuple[RecomputeOption, ...]:
    """Return the choices, least work first, that keep `less` of a block than all before them."""
    if not options:
        return ()
    kept, seconds = _kept_and_seconds(block, options)
    chosen: list[RecomputeOption] = []
    least = float("inf")
    for _, held, one in sorted(zip(seconds, kept, options, strict=True)):
        if held < least - less * max(kept):
            least = held
            chosen.append(one)
    return tuple(chosen)


def _kept_and_seconds(
    block: _Block, options: Sequence[RecomputeOption]
) -> tuple[list[float], list[float]]:
    """Return the bytes that a mean block keeps, and the seconds that it takes once more."""
    layout = stacked_layouts([LayoutNumbers(**one.numbers) for one in options])
    work = CostInputs(
        model=adapted_model_numbers(block.model, block.length),
        machine=block.machine,
        software=block.software,
        layout=layout,
    )
    mixture = block.model.experts is not None and first_number(work.model.mixture_layers) > 0
    whole, redone = bytes_of_block(work, mixture=mixture)
    stream = work.element * work.tokens * work.model.hidden
    seconds = block_seconds(replace(work, layout=LayoutNumbers()), mixture=mixture)
    share = np.array([one.share for one in options])
    kept = share * stream + (1.0 - share) * (whole - redone)
    again = share * seconds.forward.total + (1.0 - share) * seconds.again.of_layout(layout)
    return kept.tolist(), again.tolist()


def _operator_sets(shape: ModelShape) -> tuple[tuple[RecomputedOperator, ...], ...]:
    """Return sets of operators that may run again, none first."""
    attention: tuple[RecomputedOperator, ...] = ("attention",) if shape.latent is None else ()
    sets: list[tuple[RecomputedOperator, ...]] = [(), ("norm",)]
    if shape.has_dense_blocks:
        sets = [(), ("norm", "activation"), ("norm", "mlp")]
    return tuple(dict.fromkeys((*sets, *((*one, *attention) for one in sets[1:]))))


MOST_VIRTUAL = 12  # stages of a rank
MOST_STAGE = 3  # of ZeRO


@dataclass(frozen=True, slots=True)
class ZeroOption:
    """Say what data ranks share out: ZeRO's stage, over how many ranks, and where it rests.

    `secondary` is 1 where nodes keep slices, `rounding` how gathers and sums round.
    """

    zero: int
    dp_replicate: int
    dp_shard: int
    reshard: int = 1
    offload: int = 0
    secondary: int = 0
    rounding: Rounding = EXACT

    @property
    def gathered_bytes(self) -> float:
        """Return the bytes of a weight of a block that is gathered as a code, else 0."""
        return self.rounding.gathered_bytes

    @property
    def gathers_ends(self) -> float:
        """Return 1 where codes of embedding and head are gathered, too."""
        return self.rounding.gathers_ends

    @property
    def summed_bytes(self) -> float:
        """Return the bytes of a gradient of which codes are summed, else 0."""
        return self.rounding.summed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOfRanks:
    """Say which ranks of a mesh a node holds: `devices` of it, of tensor groups of `tp` ranks.

    `expert_stride` is how far apart the ranks lie that share out the same experts; 0: there are
    none. No node is known (`devices` 0) where all ranks are on one.
    """

    devices: int = 0
    tp: int = 1
    expert_stride: int = 0

    def holds_several(self, ranks: int, expert_ranks: int) -> bool:
        """Return whether of the ranks that share out each node holds several, and none all.

        Of those of experts it is enough. Nodes hold whole groups of what lies between two of them.
        """
        groups = ((ranks, self.tp), (expert_ranks, self.expert_stride))
        return any(self._holds(count, stride) for count, stride in groups)

    def _holds(self, count: int, stride: int) -> bool:
        if not self.devices or not stride or self.devices % stride:
            return False
        here = self.devices // stride
        return 1 < here < count and count % here == 0


ONE_NODE = NodeOfRanks()


@dataclass(frozen=True, slots=True)
class ScheduleOption:
    """Name a schedule with its stages on a rank, and the microbatches that it takes."""

    name: str
    virtual: int
    min_microbatches: int
    microbatch_multiple: int
    max_microbatches: int = 2**62

    @property
    def schedule(self) -> int:
        """Return the number of the schedule's closed form."""
        return int(schedule_index(self.name))

    def allows(self, num_microbatches: int) -> bool:
        """Return whether it takes so many microbatches."""
        enough = self.min_microbatches <= num_microbatches <= self.max_microbatches
        return enough and num_microbatches % self.microbatch_multiple == 0


@lru_cache(maxsize=4096)
def zero_options(
    dp: int, cp: int, ep: int, inner: int, *, offload: bool, node: NodeOfRanks = ONE_NODE
) -> tuple[ZeroOption, ...]:
    """Return every way for `dp` x `cp` ranks to share out; ep folds over dp_shard x `inner`.

    `inner` is cp, x tp where experts are whole. Nothing is rounded.
    """
    found: list[ZeroOption] = []
    for shard in divisors(dp):
        if shard * inner % ep:
            continue
        # Stage 0 cuts nothing: shards are there for experts only, as few as they need.
        if not offload and not found:
            found.append(ZeroOption(0, dp // shard, shard))
        alone = shard * cp == 1
        if not alone or offload:
            # One rank has nothing to share out; what it can is leave optimizer state to its host.
            for stage in range(1, MOST_STAGE + (not alone)):
                found.append(ZeroOption(stage, dp // shard, shard, offload=int(offload)))
                if stage < MOST_STAGE:
                    continue
                if node.holds_several(shard * cp, shard * inner // ep):
                    found.append(replace(found[-1], secondary=1))
                found.append(ZeroOption(stage, dp // shard, shard, 0, int(offload)))
    return tuple(found)


def pinned_zero_options(
    pins: Pins,
    key: tuple[int, ...],
    *,
    offload: bool,
    node: NodeOfRanks = ONE_NODE,
    roundings: Sequence[Rounding] = (EXACT,),
) -> tuple[ZeroOption, ...]:
    """Return those of `zero_options` that pins let through; `key` are its arguments in their order.

    If not pinned, units are gathered twice: that they stay whole takes memory not counted yet.
    Each is there with every one of `roundings` that it can have.
    """
    dp, cp, ep, inner = key
    wanted = pins.values_of("reshard") or (1,)
    return tuple(
        one if rounding == EXACT else replace(one, rounding=rounding)
        for one in zero_options(dp, cp, ep, inner, offload=offload, node=node)
        if (one.reshard in wanted or (one.zero < MOST_STAGE and one.reshard))
        and pins.allows("zero", one.zero)
        and pins.allows("dp_replicate", one.dp_replicate)
        and pins.allows("dp_shard", one.dp_shard)
        and pins.allows("secondary", one.secondary)
        for rounding in roundings
        if _can_round(one, rounding, node, (one.dp_shard * cp, one.dp_shard * inner // ep))
    )


def _can_round(
    option: ZeroOption, rounding: Rounding, node: NodeOfRanks, sharers: tuple[int, int]
) -> bool:
    """Return whether what is gathered and summed is of the kind that is rounded.

    `sharers` are how many ranks share out, and how many of them experts.
    """
    gathers = rounding.gather == EXACT_GATHER or option.zero == MOST_STAGE
    summed = rounding.reduce == EXACT_SUM or option.zero > 0
    return gathers and summed and (rounding.reduce == EXACT_SUM or node.holds_several(*sharers))


def schedule_options(pins: Pins, pp: int, layers: int) -> tuple[ScheduleOption, ...]:
    """Return the schedules for so many pipeline ranks, with every number of stages on a rank.

    On one rank there is nothing to order: 1f1b stands for all, also where a trainer lacks it.
    """
    if pp == 1:
        pinned = pins.values.get("schedule", (PLAIN_SCHEDULE,))
        plain = PLAIN_SCHEDULE in pinned and pins.allows("virtual", 1)
        return (ScheduleOption(PLAIN_SCHEDULE, 1, 1, 1),) if plain else ()
    wanted = pins.values_of("schedule")
    found: list[ScheduleOption] = []
    for name in map(str, SCHEDULES if wanted is None else wanted):
        builder = SCHEDULES[name]
        if wanted is None and not builder.is_searched:
            continue
        outdone = builder.outdone_from(pp) if wanted is None else None
        most = 2**62 if outdone is None else outdone - 1
        for virtual in range(1, max(1, min(MOST_VIRTUAL, layers // pp)) + 1):
            fits = builder.fits_stages(virtual * pp, pp) and virtual * pp <= layers
            if fits and pins.allows("virtual", virtual):
                least, multiple = builder.minimum_microbatches(pp), builder.microbatch_multiple
                found.append(ScheduleOption(name, virtual, least, multiple, most))
    return tuple(found)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in rising order."""
    return nearest_divisors(number, 1, limit=number)
