# SPDX-License-Identifier: Apache-2.0
"""What attention of one block works with on a context rank: call by call of a kernel.

In the letters of `cost/bytes/context_memory.py`: O elements of queries, KV of keys and values of a
place of the ring (of own heads, with their copies), L log-sum-exps; s bytes of an element, w of a
sum. What kernels make inside is not seen. Queries of a rank meet keys in pieces (full, causal, or
with a mask of their own): `RowChunkSteps` are those of each step of the ring.

    forward    the keys at work, and on their way; the merged output in w; of a piece its output,
               and three log-sum-exps
    backward   the same keys; gradients of queries, and of the keys that are here, in w; those of
               a piece
    exchanged  before: twice what is exchanged; after: four times (what attention kept is gone),
               three times where a rank gets one head of each other
    gathered   all keys, twice while they are put in order, and so their gradients

Weight gradients that were put off run while keys or heads travel: until then what they keep is
there beside attention, which is why its backward is told in parts.

Sources: as in `cost/bytes/context_memory.py`.

A mask and documents decide which rows of queries and keys a call of a kernel gets
(`layout/attention_tiles.py`). A plan knows its mask; where documents are told apart its sequences
are of one each, as a rehearsal has them, unless a batch is given. Flash attention takes a window,
or all documents, in one call: it is given all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.core.attention_mask import DocumentStarts, PositionRun, cut_position_runs
from echelon.core.plan import Plan
from echelon.cost.bytes.context_memory import (
    EDGE_BYTES,
    MAX_SCORES,
    POSITION_BYTES,
    SINK_COPIES,
    AttentionSizes,
    efficient_kernel_runs,
    flash_kernel_runs,
)
from echelon.cost.bytes.context_sent import gathers_whole
from echelon.layout.attention_tiles import tiles_between
from echelon.layout.ring_transfers import RingPlan, resident_rows, ring_plan

_SCORES = 3  # copies
"""How often the plain kernel holds the scores of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Give the heads of a rank while attention runs, and the bytes of one row of them."""

    sizes: AttentionSizes
    width: int
    queries: int
    keys: int

    @classmethod
    def of(cls, plan: Plan, cp_rank: int) -> _Heads:
        sizes, width = AttentionSizes.from_plan(plan, cp_rank), plan.model.head_dim
        heads = plan.model.heads // plan.mesh.tp // plan.layout.context.ulysses_degree
        keys = sizes.row // (2 * sizes.sequences * width)
        return cls(sizes=sizes, width=width, queries=heads, keys=keys)

    def out(self, piece: RowChunkSizes) -> int:
        """Return the elements of the queries of a piece."""
        return piece.queries * piece.sequences * self.queries * self.width

    def gradients(self, piece: RowChunkSizes) -> int:
        """Return the elements of the gradients of a piece."""
        return self.out(piece) + 2 * piece.keys * piece.sequences * self.keys * self.width

    def scores(self, piece: RowChunkSizes) -> int:
        """Return the scores of a piece, of all heads."""
        return min(piece.queries * piece.keys * piece.sequences * self.queries, MAX_SCORES)

    def again(self, piece: RowChunkSizes) -> int:
        """Return the elements of queries that the plain kernel copies: as many as `out`, or none.

        Those of several heads for each key head are put side by side; narrow ones are widened.
        """
        return self.out(piece) * (self.queries > self.keys or self.sizes.is_low_precision)

    def repeated(self, piece: RowChunkSizes) -> int:
        """Return the elements of keys and values that are repeated, for every query head one."""
        if not efficient_kernel_runs(self.sizes.plan) or self.queries == self.keys:
            return 0
        return 2 * piece.keys * piece.sequences * self.queries * self.width

    def wide_keys(self, piece: RowChunkSizes) -> int:
        """Return the bytes of the keys and values that the plain kernel widens."""
        widened = self.sizes.capped and self.sizes.is_low_precision
        return (self.gradients(piece) - self.out(piece)) * self.sizes.wide * widened

    def mask(self, piece: RowChunkSizes) -> tuple[int, int]:
        """Return the bytes of a mask while it is made, and while a kernel uses it."""
        pairs = piece.queries * piece.keys
        if self.sizes.capped:
            return (EDGE_BYTES * pairs if piece.masked else 0), 0
        if not piece.banded:
            return 0, 0
        return EDGE_BYTES * pairs, pairs * self.sizes.element_bytes


def _forward_working_bytes(heads: _Heads, pieces: AttentionRowChunks) -> int:
    """Return the most bytes in a forward pass, from the projections to the output, all counted."""
    sizes, plan, kept = heads.sizes, heads.sizes.plan, 0
    s = sizes.element_bytes
    moved = (sizes.out + sizes.keys) * s
    found: list[int] = []
    if sizes.exchanged:
        found.append(2 * moved + (sizes.keys * s if sizes.copied else 0))
        kept += moved
    if sizes.places > 1:
        kept += sizes.keys * s
    if plan.layout.context.record.gathers_keys and sizes.places > 1:
        whole, again = _gathered(sizes)
        found.append(kept + whole + again)
        blocks = [whole]
    elif sizes.places > 1:
        resident = resident_rows(plan.placement, plan.model.mask, sizes.place)[: sizes.places]
        blocks = [(one.keys + one.key_copies) * sizes.row * s for one in resident]
    else:
        blocks = [0]
    found += [kept + one for one in _merging(heads, blocks, pieces.forward)]
    if plan.model.sinks:
        narrow = sizes.out * s if sizes.is_low_precision else 0
        found.append(
            kept + blocks[-1] + sizes.out * sizes.wide + narrow + 3 * sizes.lse * sizes.wide
        )
    if sizes.exchanged:
        found.append(kept + 3 * sizes.out * s + sizes.lse * sizes.wide)
    return max(found)


def _merging(heads: _Heads, blocks: list[int], steps: RowChunkSteps) -> Iterator[int]:
    """Yield what there is in each call: keys of others, the merge, and what the call makes."""
    sizes = heads.sizes
    s, w = sizes.element_bytes, sizes.wide
    state = 0
    for block, pieces in zip(blocks, steps, strict=True):
        for piece in pieces:
            made, used = heads.mask(piece)
            out, lse = heads.out(piece), piece.queries * piece.sequences * heads.queries
            result = out * (w if sizes.capped else s) + lse * w
            scores = heads.scores(piece) * w if sizes.capped else 0
            copied, again = heads.wide_keys(piece) // 2, heads.again(piece) * w
            inside = max(again + out * w, out * w + copied + scores, _SCORES * scores)
            inside = inside if sizes.capped else heads.repeated(piece) * s + result
            yield block + state + made + 2 * scores + copied
            yield block + state + used + copied + max(result + 2 * scores, inside)
            if not state and piece.whole:
                state = result
                continue
            held = (sizes.out + sizes.lse) * w
            widened = out * w if s < w and not sizes.capped else 0
            if state and state < held:
                yield block + state + held + result
            state = held
            yield block + state + result + widened + 3 * lse * w
    yield state + (sizes.out * s if state > sizes.out * s + sizes.lse * w else 0)


def _backward_working_bytes(heads: _Heads, pieces: AttentionRowChunks) -> tuple[int, int, int]:
    """Return the most bytes in a backward pass beside what is kept and the given gradient.

    They are those before, during and after the run of weight gradients that were put off. Where
    heads were exchanged what attention kept is gone at the end: that is taken off.
    """
    sizes, plan = heads.sizes, heads.sizes.plan
    s, w, exchanged = sizes.element_bytes, sizes.wide, sizes.exchanged
    first: list[int] = [0]
    run = 2 * sizes.out * s if exchanged else 0
    found: list[int] = []
    calls = [max((_call(heads, one) for one in step), default=0) for step in pieces.backward]
    both = sizes.out + sizes.keys
    if plan.model.sinks:
        copies = SINK_COPIES if sizes.is_low_precision else 1
        pulls = (copies * sizes.out + 2 * sizes.lse) * w
        (first if sizes.places > 1 else found).append(pulls)
    if sizes.places == 1:
        (only, *_), several = pieces.backward, len(pieces.backward[0]) > 1
        sums = both * w if several or not (only and only[0].whole) else 0
        wide = sums or sizes.capped
        found += [sums + calls[0], both * w + both * s if wide and s < w else 0]
    elif plan.layout.context.record.gathers_keys:
        whole, again = _gathered(sizes)
        elements = whole // s
        run = run or again
        found += [whole + again, whole + (sizes.out + elements) * w + calls[0]]
        more = (elements + sizes.keys) * w if gathers_whole(plan) else again * w // s
        found.append(whole + (sizes.out + elements) * w + more)
    else:
        at_run, resident = 0, resident_rows(plan.placement, plan.model.mask, sizes.place)
        for one, call in zip(resident, calls, strict=True):
            blocks = (one.keys + one.key_copies) * sizes.row * s
            sums = (one.gradients + one.gradient_copies) * sizes.row * w
            first.append(blocks + sizes.out * w + sums + call)
            at_run = first[-1] - call
        (first if exchanged else found).append(first.pop())
        run = run or at_run
        found.append(both * w + (both * s if s < w else 0))
    if exchanged:
        kept = both * s * (1 + (sizes.places > 1)) + 2 * sizes.out * s + sizes.lse * w
        summed = sizes.keys // sizes.copied * w if sizes.copied else 0
        # After the run the output by position is gone, too; here it is told with what is kept.
        found = [one - sizes.out * s for one in (*first, *found)]
        # One head for each rank is a view of what came; several are put side by side.
        joined = sizes.out * (heads.queries > 1) + sizes.keys * (heads.keys > 1)
        found.append((3 * both + joined) * s + summed - kept - sizes.out * s)
        first = [run]
    return max(first), run, max(found)


def _call(heads: _Heads, piece: RowChunkSizes) -> int:
    """Return what one call makes in backward."""
    sizes, (made, used) = heads.sizes, heads.mask(piece)
    gradients = heads.gradients(piece)
    if not sizes.capped:
        s, repeated = sizes.element_bytes, heads.repeated(piece)
        lse = (
            piece.queries
            * piece.sequences
            * heads.queries
            * sizes.wide
            * efficient_kernel_runs(sizes.plan)
        )
        if not repeated:
            return max(made, used + gradients * s + lse)
        # Those of repeated heads are added up in at least float32, one after the other.
        of_heads = heads.out(piece) + repeated
        summed = (gradients - heads.out(piece)) * sizes.wide
        return max(made, used + (repeated + of_heads) * s + lse + summed)
    out, again = heads.out(piece), heads.again(piece)
    scores, wide = heads.scores(piece) * sizes.wide, sizes.wide
    delta = piece.queries * piece.sequences * heads.queries * (1 + (heads.queries > heads.keys))
    inside = max((again + out) * wide, out * wide + scores, 2 * scores + made)
    inside = max(inside, _SCORES * scores + gradients * wide)
    return (gradients + 2 * again + delta) * wide + heads.wide_keys(piece) + inside


def _gathered(sizes: AttentionSizes) -> tuple[int, int]:
    """Return the bytes of the keys that a rank gathers, and of those as they came."""
    row = sizes.row * sizes.element_bytes
    whole = sizes.gathered_rows() * row
    if gathers_whole(sizes.plan):
        return whole, whole + 2 * sizes.plan.mathematics.sequence_length * POSITION_BYTES
    return whole, whole - sizes.rows * row


def attention_working_bytes(
    plan: Plan, cp_rank: int, pieces: AttentionRowChunks | None = None
) -> tuple[int, int, int, int]:
    """Return what attention works with: forward, with all that it keeps, and in parts backward.

    Those are before the weight gradients run that were put off, meanwhile, and after it.
    """
    pieces, heads = pieces or row_chunks(plan, cp_rank), _Heads.of(plan, cp_rank)
    return _forward_working_bytes(heads, pieces), *_backward_working_bytes(heads, pieces)


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
