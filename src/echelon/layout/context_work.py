# SPDX-License-Identifier: Apache-2.0
"""How much of attention each context rank computes, and which chunks meet on which rank and when.

The work of a rank is the (query, key) pairs that its queries may meet, times the heads that it
computes: a place of a ring has its own queries and all heads of its Ulysses group, a member of that
group an equal share of the heads. Counts are exact, so over all ranks they add up to the pairs of
the mask: nothing is left out or computed twice.

A *chunk* is a run of positions of one place (two of them under zigzag placement). On a ring, place
r works at step e on the keys of place (r + e) mod n; where keys are gathered, on all of them at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from echelon.core.attention_mask import (
    AttentionMask,
    DocumentStarts,
    Placement,
    PositionRun,
    cut_position_runs,
)
from echelon.core.choices.kernels import AttendedRun, kernel_text
from echelon.core.model_shape import of_layer_kind
from echelon.core.plan import Plan

ONE_DOCUMENT: DocumentStarts = ((0,),)
"""One sequence of one document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPair:
    """Say that the queries of one chunk meet the keys of another: where, when, in how many pairs.

    Chunks are numbered by their first position; `place` is that of the queries on the ring.
    """

    queries: int
    keys: int
    place: int
    owner: int
    step: int
    pairs: int


def pairs_by_place(
    placement: Placement, mask: AttentionMask, documents: DocumentStarts = ONE_DOCUMENT
) -> tuple[int, ...]:
    """Return the visible (query, key) pairs of each place of a ring, over all `documents`."""
    n = placement.ring_degree
    return tuple(
        sum(
            pairs_between(placement.ring_runs(place), placement.ring_runs(owner), mask, starts)
            for owner in range(n)
            for starts in documents
        )
        for place in range(n)
    )


def pairs_between(
    queries: Sequence[PositionRun],
    keys: Sequence[PositionRun],
    mask: AttentionMask,
    starts: tuple[int, ...] = (0,),
) -> int:
    """Return the visible pairs of some queries and some keys of a sequence, document by document.

    All runs have the same step.
    """
    stop = max((run.position(run.count) for run in (*queries, *keys)), default=0)
    total = 0
    for start, end in zip(starts, (*starts[1:], stop), strict=True):
        inside = [run.cut(*run.between(start, end)) for run in keys]
        for whole in queries:
            q = whole.cut(*whole.between(start, end))
            total += sum(mask.band(q, k).num_pairs(q.count, k.count) for k in inside)
    return total


def half_work_row(runs: Sequence[PositionRun], mask: AttentionMask) -> int:
    """Return the row of `runs` before which about half of the pairs among them are met.

    At least one row lies before it, and one after it, where there are two.
    """
    num_rows = sum(run.count for run in runs)
    whole = pairs_between(runs, runs, mask)
    low, high = min(1, num_rows), max(1, num_rows - 1)
    while low < high:
        middle = (low + high) // 2
        if 2 * pairs_between(cut_position_runs(runs, 0, middle), runs, mask) < whole:
            low = middle + 1
        else:
            high = middle
    return low


def scores_by_rank(plan: Plan, documents: DocumentStarts | None = None) -> tuple[int, ...]:
    """Return the scores that each context rank computes of a block and a microbatch: pairs x heads.

    `documents` are those of each sequence of the microbatch; without any, sequences are whole. Of
    blocks of several kinds it is the mean.
    """
    placement, heads = plan.placement, plan.model.heads // plan.mesh.tp
    found = documents or ONE_DOCUMENT * plan.layout.microbatch_sequences
    by_place = {
        kind: pairs_by_place(placement, of_layer_kind(plan.model, kind).mask, found)
        for kind in {plan.model.layer_kind(first) for first in plan.model.first_of_kinds}
    }
    layers = [plan.model.layer_kind(layer) for layer in range(plan.model.layers)]
    pairs = [
        sum(layers.count(kind) * mine[place] for kind, mine in by_place.items()) // len(layers)
        for place in range(placement.ring_degree)
    ]
    share = heads // placement.ulysses_degree
    return tuple(pairs[placement.ring_place(rank)] * share for rank in range(plan.mesh.cp))


def attention_imbalance(plan: Plan, documents: DocumentStarts | None = None) -> float:
    """Return by what share the context rank with least attention has less than that with most."""
    scores = scores_by_rank(plan, documents)
    return (max(scores) - min(scores)) / max(scores)


def chunk_runs(placement: Placement) -> tuple[tuple[int, PositionRun], ...]:
    """Return the place and the run of each chunk, in the order of their first positions."""
    places = range(placement.ring_degree)
    runs = [(place, run) for place in places for run in placement.ring_runs(place)]
    return tuple(sorted(runs, key=lambda pair: pair[1].start))


@lru_cache(maxsize=64)
def chunk_pairs(
    placement: Placement, mask: AttentionMask, *, gathered: bool
) -> tuple[ChunkPair, ...]:
    """Return which chunks meet, where and at which step; those that a mask keeps apart do not."""
    n, chunks = placement.ring_degree, chunk_runs(placement)
    found = [
        ChunkPair(
            queries=q,
            keys=k,
            place=place,
            owner=owner,
            step=0 if gathered else (owner - place) % n,
            pairs=pairs_between((queries,), (keys,), mask),
        )
        for q, (place, queries) in enumerate(chunks)
        for k, (owner, keys) in enumerate(chunks)
    ]
    return tuple(meeting for meeting in found if meeting.pairs)


def attention_kernel_text(plan: Plan) -> str:
    """Return which kernel computes what of attention is on a rank, in words."""
    model = plan.model
    run = AttendedRun(
        backend=plan.cluster.backend,
        dtype=plan.mathematics.precision.parameters,
        head_dim=model.head_dim,
        soft_cap=model.soft_cap is not None,
        capability=plan.cluster.device.capability,
    )
    return kernel_text(plan.layout.context.attention, run)
