# SPDX-License-Identifier: Apache-2.0
"""What a search lets run again: operators of every block, and every so many blocks whole.

A set of operators leaves out bytes for seconds, by the formulas of `cost/` for a block of the model
on one device. Of all sets with every number of blocks those are tried that keep less than each one
that takes no longer: norms and activations come first, attention early in short sequences and late
in long ones, where whole blocks and MLPs are cheaper for what they free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from echelon.core.model_shape import ModelShape
from echelon.core.plan import RecomputedOperator
from echelon.cost.activations.closed_forms import bytes_of_block
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import (
    LayoutNumbers,
    MachineNumbers,
    first_number,
    stacked_layouts,
)
from echelon.cost.seconds.block import block_seconds
from echelon.cost.seconds.from_plan import model_numbers_from_shape, with_adapters
from echelon.planner.search.pins import MOST_RECOMPUTE_INTERVAL, SELECTIVE, recompute_of_pin
from echelon.planner.search.request import SearchRequest

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
        model=with_adapters(model_numbers_from_shape(block.model, block.length), block.model),
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
