# SPDX-License-Identifier: Apache-2.0
"""Which rows of queries and keys a context rank gives to kernels of attention, call by call.

A mask and documents decide that (`layout/attention_tiles.py`). A plan knows its mask; where
documents are told apart its sequences are of one each, as a rehearsal has them, unless a batch is
given. Flash attention takes a window, or all documents, in one call: it is given all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.attention_mask import DocumentStarts, PositionRun, cut_position_runs
from echelon.core.plan import Plan
from echelon.cost.bytes.context_memory import AttentionSizes, flash_kernel_runs
from echelon.cost.bytes.context_sent import gathers_whole
from echelon.layout.attention_tiles import tiles_between
from echelon.layout.ring_plan import RingPlan, ring_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChunkSizes:
    """Give the rows of one call of a kernel; `whole`: it takes all rows of all sequences."""

    queries: int
    keys: int
    sequences: int
    banded: bool = False
    masked: bool = False
    whole: bool = False


RowChunkSteps = tuple[tuple[RowChunkSizes, ...], ...]
"""The pieces of each step: one step where keys do not travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRowChunks:
    """Give the pieces of both passes; the backward of a ring has one step more."""

    forward: RowChunkSteps
    backward: RowChunkSteps


def row_chunks(
    plan: Plan, cp_rank: int, documents: DocumentStarts | None = None
) -> AttentionRowChunks:
    """Return the pieces of a microbatch with these documents, forward and backward."""
    placement, mask = plan.placement, plan.model.mask
    place = placement.ring_place(cp_rank)
    own = placement.ring_runs(place)
    if flash_kernel_runs(plan) and (mask.window is not None or documents is not None):
        return _whole_row_chunks(plan)

    def pieces(
        queries: tuple[PositionRun, ...], keys: tuple[PositionRun, ...]
    ) -> tuple[RowChunkSizes, ...]:
        rows = sum(run.count for run in queries)
        return tuple(
            RowChunkSizes(
                queries=one.num_queries,
                keys=one.num_keys,
                sequences=plan.layout.microbatch_sequences if one.sequence is None else 1,
                banded=one.form == "banded",
                masked=one.form != "full",
                whole=one.sequence is None and one.num_queries == rows,
            )
            for one in tiles_between(queries, keys, mask, documents)
        )

    if placement.ring_degree == 1 or plan.layout.context.record.gathers_keys:
        step = pieces(own, first_keys(plan, place))
        return AttentionRowChunks(forward=(step,), backward=(step, ()))
    ring = ring_plan(placement, mask, place)
    blocks = [_runs(ring, step) for step in range(ring.degree)]
    forward = tuple(pieces(own, runs) if runs else () for runs in blocks)
    count = sum(run.count for run in own)
    early = cut_position_runs(own, 0, ring.halfway)
    late = cut_position_runs(own, ring.halfway, count)
    ends = (pieces(early, own), pieces(late, own))
    return AttentionRowChunks(forward=forward, backward=(ends[0], *forward[1:], ends[1]))


def _whole_row_chunks(plan: Plan) -> AttentionRowChunks:
    """Return one piece for each step, of all queries and keys."""
    sizes, steps = AttentionSizes.from_plan(plan), plan.placement.ring_degree
    if plan.layout.context.record.gathers_keys:
        steps = 1
    keys = sizes.rows * (sizes.places if steps == 1 else 1)
    one = RowChunkSizes(queries=sizes.rows, keys=keys, sequences=sizes.sequences, whole=True)
    late = (one,) if steps > 1 else ()
    return AttentionRowChunks(forward=((one,),) * steps, backward=((one,),) * steps + (late,))


def first_keys(plan: Plan, place: int) -> tuple[PositionRun, ...]:
    """Return the keys that the queries of a place of a ring meet first."""
    placement = plan.placement
    if not plan.layout.context.record.gathers_keys or placement.ring_degree == 1:
        return placement.ring_runs(place)
    if gathers_whole(plan):
        return (PositionRun(0, 1, placement.length),)
    ring = ring_plan(placement, plan.model.mask, place, direct=True)
    owners = [ring.owner_at(step) for step in range(placement.ring_degree)]
    rows = [ring.rows_from(owner) for owner in owners]
    return tuple(run for one in rows if one is not None for run in one.runs)


def _runs(ring: RingPlan, step: int) -> tuple[PositionRun, ...]:
    rows = ring.rows_from(ring.owner_at(step))
    return () if rows is None else rows.runs
