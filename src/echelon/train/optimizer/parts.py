"""Which elements of a rank's slice an optimizer updates, and with which weight decay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from echelon.parallel.buckets import Bucket


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a rank's slice of a bucket; all of it takes weight decay, or none."""

    place: slice
    decays: bool


def parts_of(bucket: Bucket) -> list[Part]:
    """Return the parts of this rank's slice that are trained: no padding, nothing frozen."""
    frozen = [slot for slot in bucket.slots if not slot.parameter.requires_grad]
    parts: list[Part] = []
    for segment, decays in bucket.segments():
        cuts = [segment.start, segment.stop]
        for slot in frozen:
            if segment.start <= slot.start < segment.stop:
                cuts[-1:-1] = [slot.start, slot.end]
        for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
            place = bucket.within_own(slice(start, stop))
            if place.stop > place.start:
                parts.append(Part(place, decays))
    return parts


def in_calls(parts: Sequence[Part], longest: int | None) -> Iterator[tuple[list[slice], bool]]:
    """Yield the places that one fused call updates, and whether they decay.

    That is all at once, or one place of at most `longest` elements after the other.
    """
    for decays in (True, False):
        places = [part.place for part in parts if part.decays is decays]
        if longest is None:
            if places:
                yield places, decays
            continue
        for place in places:
            for start in range(place.start, place.stop, longest):
                yield [slice(start, min(start + longest, place.stop))], decays


def scale(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient in `dtype`, times a factor: in place where the dtype is its own."""
    wide = gradient if gradient.dtype == dtype else gradient.to(dtype)
    return wide if factor == 1.0 else wide.mul_(factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What one fused call updates: lists of equal length, of tensors of equal length and dtype.

    `state` has one list for each kind of `cost.updates.STATE_KINDS`.
    """

    targets: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: Sequence[list[torch.Tensor]]
    rate: float
    weight_decay: float
