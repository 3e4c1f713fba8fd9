"""What attention of one block works with on a context rank: call by call of a kernel.

In the letters of `cost/context_memory.py`: O elements of queries, KV of keys and values of a place
of the ring (of own heads, with their copies), L log-sum-exps; s bytes of an element, w of a sum.
What kernels make inside is not seen. Queries of a rank meet keys in pieces (full, causal, or with a
mask of their own); which, a mask and documents decide: `Steps` are those of each step of the ring.

    forward    the keys at work, and on their way; the merged output in w; of a piece its output,
               and three log-sum-exps
    backward   the same keys; gradients of queries, and of the keys that are here, in w; those of
               a piece
    exchanged  before: twice what is exchanged; after: four times (what attention kept is gone)
    gathered   all keys, twice while they are put in order, and so their gradients

Weight gradients that were put off run while keys or heads travel: until then what they keep is
there beside attention, which is why its backward is told in parts (`AttentionWork`).

Sources: as in `cost/context_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.cost.context import gathers_whole, routes_of
from echelon.cost.context_resident import resident_rows
from echelon.cost.context_routes import num_rows
from echelon.cost.context_sizes import Sizes

POSITION_BYTES = 8

_BAND_BYTES = 10
"""What a mask takes for each pair while it is made: an int64, and two bools."""

_SCORES, _MOST_SCORES = 3, 1 << 22
"""How often the plain kernel holds the scores of a block, and how many a block has at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Give the rows of one call of a kernel; `whole`: it takes all rows of all sequences."""

    queries: int
    keys: int
    sequences: int
    banded: bool = False
    masked: bool = False
    whole: bool = False


Steps = tuple[tuple[Piece, ...], ...]
"""The pieces of each step: one step where keys do not travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPieces:
    """Give the pieces of both passes; the backward of a ring has one step more."""

    forward: Steps
    backward: Steps


def whole_pieces(plan: Plan) -> AttentionPieces:
    """Return one piece for each step, of all queries and keys: where nothing is known of a mask."""
    sizes, steps = Sizes.of(plan), plan.placement.ring_degree
    if plan.layout.context.kind == "gathered":
        steps = 1
    keys = sizes.rows * (sizes.places if steps == 1 else 1)
    one = Piece(queries=sizes.rows, keys=keys, sequences=sizes.sequences, whole=True)
    late = (one,) if steps > 1 else ()
    return AttentionPieces(forward=((one,),) * steps, backward=((one,),) * steps + (late,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Give the heads of a rank while attention runs, and the bytes of one row of them."""

    plan: Plan
    sizes: Sizes
    queries: int
    keys: int

    @classmethod
    def of(cls, plan: Plan) -> _Heads:
        sizes = Sizes.of(plan)
        heads = plan.model.heads // plan.mesh.tp // plan.layout.context.ulysses_degree
        keys = sizes.row // (2 * sizes.sequences * plan.model.head_dim)
        return cls(plan=plan, sizes=sizes, queries=heads, keys=keys)

    def out(self, piece: Piece) -> int:
        """Return the elements of the queries of a piece."""
        return piece.queries * piece.sequences * self.queries * self.plan.model.head_dim

    def gradients(self, piece: Piece) -> int:
        """Return the elements of the gradients of a piece."""
        keys = 2 * piece.keys * piece.sequences * self.keys * self.plan.model.head_dim
        return self.out(piece) + keys

    def scores(self, piece: Piece) -> int:
        """Return the scores of a piece, of all heads."""
        return min(piece.queries * piece.keys * piece.sequences * self.queries, _MOST_SCORES)

    def again(self, piece: Piece) -> int:
        """Return the elements of queries that the plain kernel copies: as many as `out`, or none.

        Those of several heads for each key head are put side by side; narrow ones are widened.
        """
        return self.out(piece) * (self.queries > self.keys or self.sizes.is_narrow)

    def wide_keys(self, piece: Piece) -> int:
        """Return the bytes of the keys and values that the plain kernel widens."""
        capped = self.plan.model.soft_cap is not None and self.sizes.is_narrow
        return (self.gradients(piece) - self.out(piece)) * self.sizes.wide * capped

    def mask(self, piece: Piece) -> tuple[int, int]:
        """Return the bytes of a mask while it is made, and while a kernel uses it."""
        pairs, capped = piece.queries * piece.keys, self.plan.model.soft_cap is not None
        if capped:
            return (_BAND_BYTES * pairs if piece.masked else 0), 0
        if not piece.banded:
            return 0, 0
        return _BAND_BYTES * pairs, pairs * self.sizes.narrow


def forward_working(plan: Plan, cp_rank: int, pieces: AttentionPieces) -> int:
    """Return the most bytes in a forward pass, from the projections to the output, all counted."""
    heads, kept = _Heads.of(plan), 0
    sizes = heads.sizes
    s, exchanged = sizes.narrow, plan.layout.context.ulysses_degree > 1
    moved = (sizes.out + sizes.keys) * s
    found: list[int] = []
    if exchanged:
        found.append(2 * moved + (sizes.keys * s if sizes.copied else 0))
        kept += moved
    if sizes.places > 1:
        kept += sizes.keys * s
    if plan.layout.context.kind == "gathered" and sizes.places > 1:
        whole, again = _gathered(plan, sizes, cp_rank)
        found.append(kept + whole + again)
        blocks = [whole]
    elif sizes.places > 1:
        place = plan.placement.ring_place(cp_rank)
        resident = resident_rows(plan.placement, plan.model.mask, place)[: sizes.places]
        blocks = [(one.keys + one.key_copies) * sizes.row * s for one in resident]
    else:
        blocks = [0]
    found += [kept + one for one in _merging(heads, blocks, pieces.forward)]
    if exchanged:
        found.append(kept + 3 * sizes.out * s + sizes.lse * sizes.wide)
    return max(found)


def _merging(heads: _Heads, blocks: list[int], steps: Steps) -> Iterator[int]:
    """Yield what there is in each call: keys of others, the merge, and what the call makes."""
    sizes = heads.sizes
    s, w = sizes.narrow, sizes.wide
    state = 0
    for block, pieces in zip(blocks, steps, strict=True):
        for piece in pieces:
            made, used = heads.mask(piece)
            out, lse = heads.out(piece), piece.queries * piece.sequences * heads.queries
            capped = heads.plan.model.soft_cap is not None
            result = out * (w if capped else s) + lse * w
            scores = heads.scores(piece) * w if capped else 0
            copied = heads.wide_keys(piece) // 2
            again, keys = heads.again(piece) * w, heads.wide_keys(piece) // 2
            inside = max(again + out * w, out * w + keys + scores, _SCORES * scores)
            inside *= int(capped)
            yield block + state + made + 2 * scores + copied
            yield block + state + used + copied + max(result + 2 * scores, inside)
            if not state and piece.whole:
                state = result
                continue
            held = (sizes.out + sizes.lse) * w
            widened = out * w if s < w and not capped else 0
            if state and state < held:
                yield block + state + held + result
            state = held
            yield block + state + result + widened + 3 * lse * w
    yield state + (sizes.out * s if state > sizes.out * s + sizes.lse * w else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """Say what attention works with: `forward` with all that it keeps, and three parts of backward.

    `first` is before the weight gradients run that were put off, `run` meanwhile, `rest` after it.
    """

    forward: int
    first: int
    run: int
    rest: int


def backward_working(plan: Plan, cp_rank: int, pieces: AttentionPieces) -> tuple[int, int, int]:
    """Return the most bytes in a backward pass beside what is kept and the given gradient.

    They are those before, during and after the run of weight gradients that were put off. Where
    heads were exchanged what attention kept is gone at the end: that is taken off.
    """
    heads = _Heads.of(plan)
    sizes = heads.sizes
    s, w = sizes.narrow, sizes.wide
    exchanged = plan.layout.context.ulysses_degree > 1
    first: list[int] = [0]
    run = 2 * sizes.out * s if exchanged else 0
    found: list[int] = []
    calls = [max((_call(heads, one) for one in step), default=0) for step in pieces.backward]
    both = sizes.out + sizes.keys
    if sizes.places == 1:
        (only, *_), several = pieces.backward, len(pieces.backward[0]) > 1
        sums = both * w if several or not (only and only[0].whole) else 0
        wide = sums or plan.model.soft_cap is not None
        found += [sums + calls[0], both * w + both * s if wide and s < w else 0]
    elif plan.layout.context.kind == "gathered":
        whole, again = _gathered(plan, sizes, cp_rank)
        elements = whole // s
        run = run or again
        found += [whole + again, whole + (sizes.out + elements) * w + calls[0]]
        more = (elements + sizes.keys) * w if gathers_whole(plan) else again * w // s
        found.append(whole + (sizes.out + elements) * w + more)
    else:
        place, at_run = plan.placement.ring_place(cp_rank), 0
        resident = resident_rows(plan.placement, plan.model.mask, place)
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
        found.append(4 * both * s + summed - kept - sizes.out * s)
        first = [run]
    return max(first), run, max(found)


def _call(heads: _Heads, piece: Piece) -> int:
    """Return what one call makes in backward."""
    sizes, (made, used) = heads.sizes, heads.mask(piece)
    gradients = heads.gradients(piece)
    if heads.plan.model.soft_cap is None:
        return max(made, used + gradients * sizes.narrow)
    out, again = heads.out(piece), heads.again(piece)
    scores, wide = heads.scores(piece) * sizes.wide, sizes.wide
    delta = piece.queries * piece.sequences * heads.queries * (1 + (heads.queries > heads.keys))
    inside = max((again + out) * wide, out * wide + scores, 2 * scores + made)
    inside = max(inside, _SCORES * scores + gradients * wide)
    return (gradients + 2 * again + delta) * wide + heads.wide_keys(piece) + inside


def _gathered(plan: Plan, sizes: Sizes, cp_rank: int) -> tuple[int, int]:
    """Return the bytes of the keys that a rank gathers, and of those as they came."""
    place, rows = plan.placement.ring_place(cp_rank), sizes.rows * sizes.places
    if gathers_whole(plan):
        whole = rows * sizes.row * sizes.narrow
        return whole, whole + 2 * plan.mathematics.sequence_length * POSITION_BYTES
    needs = routes_of(plan).needs
    others = sum(num_rows(found) for (who, _), found in needs.items() if who == place)
    row = sizes.row * sizes.narrow
    return (sizes.rows + others) * row, others * row


def working(plan: Plan, cp_rank: int, pieces: AttentionPieces | None = None) -> AttentionWork:
    """Return what attention works with."""
    pieces = pieces or whole_pieces(plan)
    first, run, rest = backward_working(plan, cp_rank, pieces)
    forward = forward_working(plan, cp_rank, pieces)
    return AttentionWork(forward=forward, first=first, run=run, rest=rest)
