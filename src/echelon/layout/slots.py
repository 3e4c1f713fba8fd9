# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie in a bucket, and which part of each is in which slice of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.layout.buckets import BucketPlan, segment_order, shard_degree, slice_elements
from echelon.layout.stage import pieces_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRange:
    """Say that the local piece of a parameter is elements `start` to `stop` of its bucket."""

    spec: ParameterSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePart:
    """Say that slice `index` of a bucket holds elements `start` to `stop` of a local parameter.

    `bucket_start` is where `start` lies in the whole bucket.
    """

    index: int
    start: int
    stop: int
    bucket_start: int


def slot_ranges(
    plan: Plan, bucket: BucketPlan, specs: dict[str, ParameterSpec]
) -> tuple[SlotRange, ...]:
    """Return where the parameters of `bucket` lie; `specs` are those of the stage, by name."""
    ranges: list[SlotRange] = []
    start = 0
    for name in segment_order(bucket.names, specs, plan.mathematics.optimizer):
        stop = start + specs[name].local_numel(pieces_of(plan, specs[name]))
        ranges.append(SlotRange(spec=specs[name], start=start, stop=stop))
        start = stop
    return tuple(ranges)


def trained_buckets(buckets: Iterable[BucketPlan]) -> tuple[BucketPlan, ...]:
    """Return the buckets that have gradients and state: all but frozen ones."""
    return tuple(bucket for bucket in buckets if not bucket.frozen)


def slice_parts(plan: Plan, bucket: BucketPlan, slot: SlotRange) -> tuple[SlicePart, ...]:
    """Return the part of a parameter in each slice of its bucket that touches it, in order."""
    size = slice_elements(plan, bucket)
    num_slices = shard_degree(plan, expert=bucket.expert)
    first, last = slot.start // size, min(-(-slot.stop // size), num_slices)
    parts: list[SlicePart] = []
    for index in range(first, last):
        start, stop = max(slot.start, index * size), min(slot.stop, (index + 1) * size)
        parts.append(
            SlicePart(
                index=index, start=start - slot.start, stop=stop - slot.start, bucket_start=start
            )
        )
    return tuple(parts)
