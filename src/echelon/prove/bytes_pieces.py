"""Which pieces of queries and keys a context rank gives to its kernels, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.attention_mask import DocumentStarts, Run, cut_runs
from echelon.core.plan import Plan
from echelon.cost.activations_working import AttentionPieces, Piece
from echelon.cost.context import gathers_whole
from echelon.models.attention.pieces import pieces_between
from echelon.parallel.context.blocks import Course, course_of


def attention_pieces(plan: Plan, cp_rank: int, documents: DocumentStarts | None) -> AttentionPieces:
    """Return the pieces of a microbatch with these documents, forward and backward."""
    placement, mask = plan.placement, plan.model.mask
    place = placement.ring_place(cp_rank)
    own = placement.ring_runs(place)

    def pieces(queries: tuple[Run, ...], keys: tuple[Run, ...]) -> tuple[Piece, ...]:
        rows = sum(run.count for run in queries)
        return tuple(
            Piece(
                queries=one.num_queries,
                keys=one.num_keys,
                sequences=plan.layout.microbatch_sequences if one.sequence is None else 1,
                banded=one.form == "banded",
                masked=not one.full,
                whole=one.sequence is None and one.num_queries == rows,
            )
            for one in pieces_between(queries, keys, mask, documents)
        )

    if placement.ring_degree == 1 or plan.layout.context.kind == "gathered":
        step = pieces(own, first_keys(plan, place))
        return AttentionPieces(forward=(step,), backward=(step, ()))
    course = course_of(placement, mask, place)
    blocks = [_runs(course, step) for step in range(course.degree)]
    forward = tuple(pieces(own, runs) if runs else () for runs in blocks)
    count = sum(run.count for run in own)
    early = cut_runs(own, 0, course.halfway)
    late = cut_runs(own, course.halfway, count)
    ends = (pieces(early, own), pieces(late, own))
    return AttentionPieces(forward=forward, backward=(ends[0], *forward[1:], ends[1]))


def first_keys(plan: Plan, place: int) -> tuple[Run, ...]:
    """Return the keys that the queries of a place of a ring meet first."""
    placement = plan.placement
    if plan.layout.context.kind != "gathered" or placement.ring_degree == 1:
        return placement.ring_runs(place)
    if gathers_whole(plan):
        return (Run(0, 1, placement.length),)
    course = course_of(placement, plan.model.mask, place, direct=True)
    owners: Sequence[int] = [course.owner_at(step) for step in range(placement.ring_degree)]
    rows = [course.rows_of(owner) for owner in owners]
    return tuple(run for one in rows if one is not None for run in one.runs)


def _runs(course: Course, step: int) -> tuple[Run, ...]:
    rows = course.rows_of(course.owner_at(step))
    return () if rows is None else rows.runs
