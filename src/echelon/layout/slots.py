# SPDX-License-Identifier: Apache-2.0
"""Places of parameters in a bucket, in its slices, and in the ranges of parameter servers.

Of parameter servers each holds a range of every bucket: each bucket is cut into as many ranges as
there are servers, so all servers have work while one bucket travels. What a cut leaves over goes to
the servers in turn: of N elements of all buckets server s has floor((N + S - 1 - s) / S), so no two
servers differ by more than one element.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014, section 4.2
(ranges of keys).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.layout.buckets import (
    BucketPlan,
    plan_buckets,
    segment_order,
    shard_degree,
    slice_elements,
)
from echelon.layout.stage import part_of, pieces_of


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


BucketRanges = tuple[range, ...]
"""The range of one bucket on each server, in the order of servers."""


def server_ranges(sizes: Sequence[int], num_servers: int) -> tuple[BucketRanges, ...]:
    """Return the ranges of buckets of these sizes: they cover each bucket once, in order."""
    found: list[BucketRanges] = []
    ends = [0, *accumulate(sizes)]
    for before, after in pairwise(ends):
        shares = [
            _share(after, server, num_servers) - _share(before, server, num_servers)
            for server in range(num_servers)
        ]
        stops = [0, *accumulate(shares)]
        found.append(tuple(range(a, b) for a, b in pairwise(stops)))
    return tuple(found)


def _share(elements: int, server: int, num_servers: int) -> int:
    return (elements + num_servers - 1 - server) // num_servers


@lru_cache(maxsize=64)
def served_buckets(plan: Plan) -> tuple[BucketPlan, ...]:
    """Return the buckets of a worker: every worker has the same, and servers hold ranges of them.

    They are in the order in which backward completes them.
    """
    return plan_buckets(plan, part_of(plan, 0))


def plan_server_ranges(plan: Plan) -> tuple[BucketRanges, ...]:
    """Return the ranges of the buckets of a plan on each of its servers."""
    sizes = [bucket.num_elements for bucket in served_buckets(plan)]
    return server_ranges(sizes, plan.mesh.servers)


def server_elements(plan: Plan, server: int) -> int:
    """Return how many elements server number `server` holds of all buckets."""
    return sum(len(ranges[server]) for ranges in plan_server_ranges(plan))


def server_of_rank(plan: Plan, rank: int) -> int:
    """Return the number of the server that `rank` is."""
    return plan.mesh.server_ranks.index(rank)
