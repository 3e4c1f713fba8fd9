# SPDX-License-Identifier: Apache-2.0
"""Buffers of sets of offloaded tensors: as many as are in use at a time, and they stay.

Each is as large as the largest set of its store, which is one bucket's slices: of the optimizer
what one job of the update reads, of parameters the slice itself. Two jobs are at hand at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.offload_file import round_up_to_pages
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.terms import Pool
from echelon.cost.bytes.transient import buffer_pools
from echelon.layout.buckets import BucketPlan, slice_elements
from echelon.layout.slots import trained_buckets

JOBS_AT_HAND = 2
"""Jobs of an update whose sets have buffers: one that runs, and the next."""


def offload_buffer_bytes(
    plan: Plan, buckets: Sequence[BucketPlan], reads: int, pools: set[Pool]
) -> int:
    """Return the bytes of buffers in `pools`, where so many slices of parameters are read ahead."""
    zero, precision = plan.layout.zero, plan.mathematics.precision
    trained = trained_buckets(buckets)
    sets = [_largest_set(plan, bucket) for bucket in trained]
    jobs = sum(len(_sets(plan, bucket)) for bucket in trained)
    count = min(zero.offload_buffers, JOBS_AT_HAND, jobs)
    found = sum(
        count * max(sets, default=0)
        for pool in buffer_pools(plan, zero.optimizer_offload)
        if pool in pools
    )
    size = DTYPE_BYTES[precision.parameters]
    values = [
        round_up_to_pages(slice_elements(plan, bucket) * size)
        for bucket in buckets
        if bucket.sliced
    ]
    count = max(reads, min(JOBS_AT_HAND, len(values)))
    return found + sum(
        count * max(values, default=0)
        for pool in buffer_pools(plan, zero.parameter_offload)
        if pool in pools
    )


def _largest_set(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of the largest set of the optimizer that a job reads of a bucket."""
    master = DTYPE_BYTES[plan.mathematics.precision.master]
    each = round_up_to_pages(slice_elements(plan, bucket) * master)
    return max(_sets(plan, bucket), default=0) * each


def _sets(plan: Plan, bucket: BucketPlan) -> list[int]:
    """Return how many tensors each job of the update of a bucket reads."""
    return [count for count in _tensors(plan, bucket) if count]


def _tensors(plan: Plan, bucket: BucketPlan) -> Iterator[int]:
    record, master = OPTIMIZERS[bucket.update], int(plan.mathematics.precision.has_master)
    if record.needs_whole_matrices:
        yield from (len(record.state), master)
    else:
        yield len(record.state) + master
