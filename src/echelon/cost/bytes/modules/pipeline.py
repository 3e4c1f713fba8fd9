# SPDX-License-Identifier: Apache-2.0
"""What a rank sends to train a module of one's own that is cut into pipeline stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.data import mirrored_bytes, module_bytes, tied_bytes
from echelon.cost.bytes.terms import all_gather_bytes, reduce_scatter_bytes
from echelon.layout.buckets import accumulates_slices, shard_degree, slice_elements
from echelon.layout.module_buckets import ModuleBuckets
from echelon.layout.stage import part_of
from echelon.schedule.from_plan import num_messages_from_plan


def module_pipeline_bytes(
    plan: Plan, buckets: ModuleBuckets, *, rank: int, stream_elements: int
) -> dict[str, int]:
    """Return the bytes that `rank` sends in a step, by axis; those of `world` are not among them.

    `stream_elements` are those of the tensor that travels, per microbatch. At ZeRO stage 3 the
    parameters of a stage are gathered for the forward and for the backward of each microbatch.
    """
    part = part_of(plan, rank)
    passes = {one.stage: one.microbatches for one in part.stages}
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    activations, gradients = num_messages_from_plan(plan, part.pp_rank)
    sent = Counter(module_bytes(plan, _as_whole(buckets), rank=rank, passes=1, kept=()))
    degree, zero = shard_degree(plan), plan.layout.zero
    if zero.stage:
        wide = DTYPE_BYTES[plan.mathematics.precision.reduction]
        for bucket in (*buckets.trained, *buckets.frozen):
            crossings = sum(passes[stage] for stage in bucket.stages)
            piece = slice_elements(plan, bucket)
            if bucket.sliced:
                gathers = 2 * crossings if zero.reshard_after_forward else 1
                sent[Axis.DP_SHARD.value] += (gathers - 1) * all_gather_bytes(piece * size, degree)
        for bucket in buckets.trained if accumulates_slices(plan) else ():
            # After each backward of each of its stages; the first one is counted above.
            crossings = sum(passes[stage] for stage in bucket.stages)
            piece = reduce_scatter_bytes(slice_elements(plan, bucket) * wide, degree)
            sent[Axis.DP_SHARD.value] += (crossings - 1) * piece
    tied = tied_bytes(plan, buckets.trained, rank)
    mirrored = mirrored_bytes(plan, part, buckets.trained, rank)
    sent[Axis.PP.value] += (activations + gradients) * stream_elements * size
    sent[Axis.PP.value] += tied.bytes + mirrored.bytes
    return {axis: count for axis, count in sent.items() if count}


def _as_whole(buckets: ModuleBuckets) -> ModuleBuckets:
    """Return buckets of which each is gathered once."""
    return ModuleBuckets(
        trained=tuple(replace(one, sliced=False) for one in buckets.trained),
        frozen=tuple(replace(one, sliced=False) for one in buckets.frozen),
    )
