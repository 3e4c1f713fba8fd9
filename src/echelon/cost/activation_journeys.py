"""What a mixture of experts has beside what it keeps: rows on their way, chunk by chunk.

A chunk of rows makes four journeys: to its experts and home, and backward their transposes. Each is
a `Motion`: what there is when it has started, while nobody waits for it, at most while it is waited
for, and what comes. Chunks overlap as in `parallel/expert/layer.py`: the next one departs before
the one at hand is waited for, and backward all have departed before the first is waited for.

In the letters of `cost/activations_experts.py`; s bytes of an element, w of a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.cost.activation_numbers import INDEX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """Give the bytes of rows on their way, beside what is given; `holds`: they are what is given.

    `flying` is there while nobody waits, `starts` and `arrives` at most at both ends, and `lands`
    is what comes.
    """

    starts: int
    flying: int
    arrives: int
    lands: int
    holds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Count the rows that a hop takes from here, that it brings here, and that stay.

    `alone` says that there is nobody else: nothing is sent, and nothing put in order.
    """

    leaving: int
    here: int
    stays: int
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBytes:
    """Give the bytes of a row, of a gate, and how many gates a token has."""

    row: int
    gate: int
    top_k: int

    def sums(self, tokens: int) -> int:
        """Return what adds up the rows of so many tokens."""
        return tokens * (self.row + 2 * INDEX_BYTES)

    def scatter(self, hop: Hop, gates: int) -> Motion:
        """Return the motion of rows (and gates, where 1) to experts in one hop."""
        each = self.row + gates * self.gate
        if hop.alone:
            whole = hop.leaving * each
            return Motion(starts=whole, flying=whole, arrives=whole, lands=whole)
        flying, lands = (hop.leaving + hop.here - hop.stays) * each, hop.here * each
        return Motion(starts=flying, flying=flying, arrives=flying + lands, lands=lands)

    def collect(self, hop: Hop, tokens: int, gates: int) -> Motion:
        """Return the motion of rows back to tokens in one hop."""
        each = self.row + gates * self.gate
        lands = tokens * (self.row + gates * self.top_k * self.gate)
        added = self.sums(tokens) + tokens * gates * self.top_k * self.gate
        if hop.alone:
            given = hop.here * each
            return Motion(starts=0, flying=given, arrives=given + added, lands=lands, holds=True)
        flying = (hop.here + hop.leaving - hop.stays) * each
        arrives = flying + hop.leaving * each + added
        return Motion(starts=flying, flying=flying, arrives=arrives, lands=lands)

    def scatter_twice(self, across: Hop, within: Hop, gates: int) -> Motion:
        """Return the motion in two hops, in the first of which a row takes all its gates along."""
        every = RowBytes(row=self.row, gate=self.top_k * self.gate, top_k=1)
        first, second = every.scatter(across, gates), self.scatter(within, gates)
        # What crossed lives until all is there, and so does what it was put in order from.
        arrives = first.arrives + second.arrives
        return Motion(starts=first.starts, flying=first.flying, arrives=arrives, lands=second.lands)

    def collect_twice(self, hops: tuple[Hop, Hop], tokens: int, gates: int) -> Motion:
        """Return the motion back in two hops; the one within a node is over when it has started."""
        across, within = hops
        every = RowBytes(row=self.row, gate=self.top_k * self.gate, top_k=1)
        first = self.collect(within, across.here, gates)
        second = every.collect(across, tokens, gates)
        starts = max(first.arrives, first.lands + second.starts)
        return Motion(
            starts=starts, flying=second.flying, arrives=second.arrives, lands=second.lands
        )

    def padded(self, slots: int, gates: int, *, alone: bool, copies: bool) -> Motion:
        """Return the motion of all slots to experts; `copies`: they are put in order there."""
        each = self.row + gates * self.gate
        came = (slots + 1) * each
        flying = came + (0 if alone else slots * each)
        lands = slots * each if copies else came
        arrives = max(flying, came + copies * lands)
        return Motion(starts=came + slots * each, flying=flying, arrives=arrives, lands=lands)

    def padded_home(
        self, tokens: int, slots: int, gates: int, *, alone: bool, copies: bool
    ) -> Motion:
        """Return the motion of all slots back to tokens."""
        each = self.row + gates * self.gate
        lands = tokens * (self.row + gates * self.top_k * self.gate)
        came = (slots + 1) * each
        flying = came + slots * each * (copies and not alone)
        arrives = max(flying, came + self.sums(tokens) + lands - tokens * self.row)
        return Motion(starts=flying, flying=flying, arrives=arrives, lands=lands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Give the journeys of a chunk, in bytes, and what its experts work with.

    `rows` and `gates` are those at the experts here, `inner` one inner activation of them all;
    `forward` and `backward` are what experts have inside, one after the other.
    """

    out: Motion
    home: Motion
    back: Motion
    last: Motion
    rows: int
    gates: int
    inner: int
    forward: int
    backward: int

    @property
    def saved(self) -> int:
        """Return what is kept: rows and gates as they came, gate and up."""
        return self.out.lands + 2 * self.inner

    @property
    def saved_rows(self) -> int:
        """Return the rows among it."""
        return self.out.lands * self.rows // max(self.rows + self.gates, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Say what backward through experts has at most, and leaves: rows `flying`, and weight
    gradients that were put off, with what they keep. `departs` is the most until all have departed
    that the gradient of the outputs is needed for."""

    departs: int
    peak: int
    flying: int
    put_off: int


def departed(chunks: Sequence[Chunk]) -> int:
    """Return what is under way when the first chunk is waited for."""
    return sum(one.out.flying for one in chunks[:2])


def forward_bytes(chunks: Sequence[Chunk], *, graph: bool) -> int:
    """Return the most that there is from the first arrival on; `graph`: what is kept counts."""
    peak = now = departed(chunks)
    before = made = 0
    for place, one in enumerate(chunks):
        if place and place + 1 < len(chunks):
            peak = max(peak, now + chunks[place + 1].out.starts)
            now += chunks[place + 1].out.flying
        now -= one.out.flying
        peak = max(peak, now + one.out.arrives)
        now += one.out.lands
        if not graph:
            # Variables live until the next chunk has others.
            now, before = now - before, one.out.lands
        peak = max(peak, now + one.rows + one.forward)
        now += one.rows - made + graph * 2 * one.inner
        peak = max(peak, now + one.home.starts)
        made = 0 if one.home.holds else one.rows
        now += one.home.flying - one.home.holds * one.rows
    for one in chunks:
        now -= one.home.flying
        peak = max(peak, now + one.home.arrives)
        now += one.home.lands
    together = sum(one.home.lands for one in chunks) if len(chunks) > 1 else 0
    return max(peak, now + together)


def backward_bytes(chunks: Sequence[Chunk], *, put_off: bool, product: int, split: bool) -> Left:
    """Return what backward has from the gradient of the outputs to that of rows that leave.

    Weight gradients run when rows are waited for next (or at once, unless `put_off`), with a
    `product` of their own; where backward is `split`, later.
    """
    peak = now = waits = 0
    for one in reversed(chunks):
        peak = max(peak, now + one.back.starts)
        now += one.back.flying
    departs = peak
    for one in reversed(chunks):
        if waits and not split:
            peak = max(peak, now + product)
            now, waits = now - waits, 0
        now -= one.back.flying
        peak = max(peak, now + one.back.arrives)
        now += one.back.lands
        given = one.rows + one.gates
        peak = max(peak, now + given + one.backward)
        now += given - one.saved
        if put_off or split:
            kept = one.back.lands + one.saved_rows + 3 * one.inner
            now += kept - one.back.lands
            waits += kept
        else:
            peak = max(peak, now + one.saved + product)
            now -= one.back.lands
        peak = max(peak, now + one.last.starts)
        now += one.last.flying - given
    flying = now + sum(one.saved for one in chunks) - waits
    return Left(departs=departs, peak=peak, flying=flying, put_off=0 if split else waits)


def landing_bytes(chunks: Sequence[Chunk], left: Left, product: int) -> int:
    """Return the most that there is while the gradients of tokens come, weight gradients first."""
    now = left.flying
    peak = now + left.put_off + (product if left.put_off else 0)
    for one in reversed(chunks):
        now -= one.last.flying
        peak = max(peak, now + one.last.arrives)
        now += one.last.lands
    together = sum(one.last.lands for one in chunks) if len(chunks) > 1 else 0
    return max(peak, now + together)
