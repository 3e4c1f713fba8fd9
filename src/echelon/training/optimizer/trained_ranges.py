# SPDX-License-Identifier: Apache-2.0
"""Fused updates of a slice: which of its elements are trained, and in which calls.

Where a plan asks for it an update is one pass, a call for each range: gradients are read as they
are, and values are written with what they are copies of. Elsewhere one call updates everything that
decays and one the rest, of which a slice mostly has but one. Where values are also cast (a gradient
to the dtype of the master copy, the copy to the parameters'), a call takes as much as stays in
cache between the passes, and memory for no more than that.

A pass is an operator of PyTorch for each rule that has one. On a GPU, where what is updated is
float32, it is a kernel in Triton (`parallel/kernels/update_triton.py`) that reads a gradient in its
own dtype and writes what the parameters are kept as. Elsewhere the rule's own fused update runs,
with a cast before and after it: so a plan with kernels for GPUs is proven where there are none. On
tensors without elements nothing runs, and a rehearsal counts one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.parallel.storage.buckets import Bucket

TrainedRange = tuple[slice, bool]
"""A range of a rank's slice of a bucket, and whether it takes weight decay."""

_IN_TRITON = "echelon.parallel.kernels.update_triton"

UPDATES: Any = torch.ops.echelon
"""Where the operators are found, by their names."""


def trained_ranges(bucket: Bucket) -> list[TrainedRange]:
    """Return the parts of this rank's slice that are trained: no padding, nothing frozen."""
    frozen = [slot for slot in bucket.slots if not slot.parameter.requires_grad]
    parts: list[TrainedRange] = []
    for segment, decays in bucket.segments():
        cuts = [segment.start, segment.stop]
        for slot in frozen:
            if segment.start <= slot.start < segment.stop:
                cuts[-1:-1] = [slot.start, slot.end]
        for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
            place = bucket.within_own_slice(slice(start, stop))
            if place.stop > place.start:
                parts.append((place, decays))
    return parts


def fused_calls(
    parts: Sequence[TrainedRange], longest: int | None
) -> Iterator[tuple[list[slice], bool]]:
    """Yield the places that one fused call updates, and whether they decay.

    That is all at once, or one place of at most `longest` elements after the other.
    """
    for decays in (True, False):
        places = [place for place, decayed in parts if decayed is decays]
        if longest is None:
            if places:
                yield places, decays
            continue
        for place in places:
            for start in range(place.start, place.stop, longest):
                yield [slice(start, min(start + longest, place.stop))], decays


def scale_gradient(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient in `dtype`, times a factor: in place where the dtype is its own."""
    wide = gradient if gradient.dtype == dtype else gradient.to(dtype)
    return wide if factor == 1.0 else wide.mul_(factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOperands:
    """What one fused call updates: lists of equal length, of tensors of equal length and dtype.

    `state` has one list for each kind of `OptimizerRecord.state`.
    """

    targets: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: Sequence[list[torch.Tensor]]
    rate: float
    weight_decay: float


class ElementRule(Protocol):
    """Update each element by its own gradient and state; made from the `Optimizer` of a plan."""

    def start_update(self, count: int) -> None:
        """Say that the update to come is number `count` of all, from 1."""
        ...

    def update(self, operands: FusedOperands) -> None:
        """Update the targets and their state in place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePassOperands:
    """What one pass updates: tensors of equal length, the gradient in a dtype of its own.

    `values` are what the target is published as; None where they are the target, or written later.
    """

    target: torch.Tensor
    gradient: torch.Tensor
    state: Sequence[torch.Tensor]
    values: torch.Tensor | None
    rate: float
    factor: float
    weight_decay: float

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Return what is the same for all elements, whatever the rule."""
        return self.rate, self.factor, self.weight_decay


@runtime_checkable
class OnePassRule(ElementRule, Protocol):
    """Update each element in one pass, casts and scaling included (`OptimizerRecord.one_pass`)."""

    def update_in_one_pass(self, operands: OnePassOperands) -> None:
        """Update the target, its state and the values in place; the gradient stays as it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSlices:
    """What one bucket's update reads and writes on this rank.

    `target` is what is updated: the master copy, or `values` themselves. `scratch` says that
    `values` are a buffer: where there is a master copy, all of it is written. `pieces` bound the
    elements of a call that casts; with `one_pass`, where the rule has it, there is none.
    """

    gradient: torch.Tensor
    values: torch.Tensor
    target: torch.Tensor
    state: Sequence[torch.Tensor]
    scratch: bool
    pieces: PieceSizes = TRAINING_PIECES
    one_pass: bool = False


def update_elements(
    rule: ElementRule,
    slices: UpdateSlices,
    parts: Sequence[TrainedRange],
    *,
    rate: float,
    factor: float,
    weight_decay: float,
) -> None:
    """Update the target by `rule` from the gradient times `factor`, and the values with it."""
    target, gradient = slices.target, slices.gradient
    if slices.one_pass and isinstance(rule, OnePassRule):
        _update_in_one_pass(rule, slices, parts, rate, factor, weight_decay)
        return
    casts = target is not slices.values or gradient.dtype != target.dtype
    on_cpu = target.device.type == "cpu"
    cached = slices.pieces.update_elements if on_cpu else slices.pieces.gpu_update_elements
    longest = cached if casts else None
    for places, decays in fused_calls(parts, longest):
        rule.update(
            FusedOperands(
                targets=[target[place] for place in places],
                gradients=[
                    scale_gradient(gradient[place], factor, target.dtype) for place in places
                ],
                state=[[one[place] for place in places] for one in slices.state],
                rate=rate,
                weight_decay=weight_decay if decays else 0.0,
            )
        )
        if target is not slices.values and not slices.scratch:
            for place in places:
                slices.values[place] = target[place]
    if target is not slices.values and slices.scratch:
        slices.values.copy_(target)


def _update_in_one_pass(
    rule: OnePassRule,
    slices: UpdateSlices,
    parts: Sequence[TrainedRange],
    rate: float,
    factor: float,
    weight_decay: float,
) -> None:
    target, copies = slices.target, slices.target is not slices.values
    for place, decays in parts:
        rule.update_in_one_pass(
            OnePassOperands(
                target=target[place],
                gradient=slices.gradient[place],
                state=[one[place] for one in slices.state],
                values=slices.values[place] if copies and not slices.scratch else None,
                rate=rate,
                factor=factor,
                weight_decay=weight_decay if decays else 0.0,
            )
        )
    if copies and slices.scratch:
        slices.values.copy_(target)


def kernels_for(target: torch.Tensor) -> Any | None:
    """Return the kernels that update a tensor; None where the rule's own update does."""
    if target.is_cuda and target.dtype == torch.float32:
        return import_module(_IN_TRITON)
    return None


def scaled(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient in `dtype`, times a factor; the gradient itself stays as it is."""
    wide = gradient.to(dtype)
    return wide if factor == 1.0 else wide * factor


def publish(target: torch.Tensor, values: torch.Tensor | None) -> None:
    """Write what was updated where the parameters are, unless it is them."""
    if values is not None:
        values.copy_(target)
