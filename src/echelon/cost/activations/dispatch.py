# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts has beside what it keeps: rows on their way, chunk by chunk.

A chunk of rows makes four journeys: to its experts and home, and backward their transposes. Each is
a `TransferBytes`: what there is when it has started, while nobody waits for it, at most while it
is waited for, and what comes. Chunks overlap as in `parallel/expert/layer.py`: the next one
departs before the one at hand is waited for, and backward all have departed before the first is
waited for.

In the letters of `cost/activations/experts.py`; s bytes of an element, w of a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.cost.bytes.terms import INDEX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBytes:
    """Give the bytes of rows on their way, beside what is given; `holds`: they are what is given.

    `in_flight` is there while nobody waits, `at_start` and `at_arrival` at most at both ends, and
    `arrived` is what comes.
    """

    at_start: int
    in_flight: int
    at_arrival: int
    arrived: int
    holds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HopRows:
    """Count the rows that a hop takes from here, that it brings here, and that stay.

    `alone` says that there is nobody else: nothing is sent, and nothing put in order.
    """

    leaving: int
    arriving: int
    staying: int
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

    def scatter(self, hop: HopRows, gates: int) -> TransferBytes:
        """Return the motion of rows (and gates, where 1) to experts in one hop."""
        each = self.row + gates * self.gate
        if hop.alone:
            whole = hop.leaving * each
            return TransferBytes(at_start=whole, in_flight=whole, at_arrival=whole, arrived=whole)
        in_flight, arrived = (hop.leaving + hop.arriving - hop.staying) * each, hop.arriving * each
        return TransferBytes(
            at_start=in_flight, in_flight=in_flight, at_arrival=in_flight + arrived, arrived=arrived
        )

    def collect(self, hop: HopRows, tokens: int, gates: int) -> TransferBytes:
        """Return the motion of rows back to tokens in one hop."""
        each = self.row + gates * self.gate
        arrived = tokens * (self.row + gates * self.top_k * self.gate)
        added = self.sums(tokens) + tokens * gates * self.top_k * self.gate
        if hop.alone:
            given = hop.arriving * each
            return TransferBytes(
                at_start=0, in_flight=given, at_arrival=given + added, arrived=arrived, holds=True
            )
        in_flight = (hop.arriving + hop.leaving - hop.staying) * each
        at_arrival = in_flight + hop.leaving * each + added
        return TransferBytes(
            at_start=in_flight, in_flight=in_flight, at_arrival=at_arrival, arrived=arrived
        )

    def scatter_twice(self, across: HopRows, within: HopRows, gates: int) -> TransferBytes:
        """Return the motion in two hops, in the first of which a row takes all its gates along."""
        every = RowBytes(row=self.row, gate=self.top_k * self.gate, top_k=1)
        first, second = every.scatter(across, gates), self.scatter(within, gates)
        # What crossed lives until all is there, and so does what it was put in order from.
        at_arrival = first.at_arrival + second.at_arrival
        return replace(first, at_arrival=at_arrival, arrived=second.arrived)

    def collect_twice(
        self, hops: tuple[HopRows, HopRows], tokens: int, gates: int
    ) -> TransferBytes:
        """Return the motion back in two hops; the one within a node is over when it has started."""
        across, within = hops
        every = RowBytes(row=self.row, gate=self.top_k * self.gate, top_k=1)
        first = self.collect(within, across.arriving, gates)
        second = every.collect(across, tokens, gates)
        starts = max(first.at_arrival, first.arrived + second.at_start)
        return replace(second, at_start=starts, holds=False)

    def padded(self, slots: int, gates: int, *, alone: bool, copies: bool) -> TransferBytes:
        """Return the motion of all slots to experts; `copies`: they are put in order there."""
        each = self.row + gates * self.gate
        came = (slots + 1) * each
        in_flight = came + (0 if alone else slots * each)
        arrived = slots * each if copies else came
        at_arrival = max(in_flight, came + copies * arrived)
        return TransferBytes(
            at_start=came + slots * each,
            in_flight=in_flight,
            at_arrival=at_arrival,
            arrived=arrived,
        )

    def padded_home(
        self, tokens: int, slots: int, gates: int, *, alone: bool, copies: bool
    ) -> TransferBytes:
        """Return the motion of all slots back to tokens."""
        each = self.row + gates * self.gate
        arrived = tokens * (self.row + gates * self.top_k * self.gate)
        came = (slots + 1) * each
        in_flight = came + slots * each * (copies and not alone)
        at_arrival = max(in_flight, came + self.sums(tokens) + arrived - tokens * self.row)
        return TransferBytes(
            at_start=in_flight, in_flight=in_flight, at_arrival=at_arrival, arrived=arrived
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchChunk:
    """Give what a chunk sends and receives, in bytes, and what its experts work with."""

    dispatch: TransferBytes
    """Its rows on their way to experts."""
    combine: TransferBytes
    """Its outputs on their way home."""
    back: TransferBytes
    """Gradients of outputs on their way to experts."""
    last: TransferBytes
    """Gradients of rows on their way home."""
    rows: int
    """Bytes of the rows at the experts here."""
    gates: int
    """Bytes of the gates at the experts here."""
    inner: int
    """Bytes of one inner activation of all those rows."""
    forward: int
    """Bytes that experts have inside, forward."""
    backward: int
    """Bytes that experts have inside, backward."""
    collected: int = 0
    """The same where all weight gradients wait for W, if that is more."""
    vectors: int = 0
    """Bytes of the gradients of biases."""

    @property
    def saved(self) -> int:
        """Return what is kept: rows and gates as they came, gate and up."""
        return self.dispatch.arrived + 2 * self.inner

    @property
    def saved_rows(self) -> int:
        """Return the rows among it."""
        return self.dispatch.arrived * self.rows // max(self.rows + self.gates, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardRemainder:
    """Say what backward through experts has at most, and leaves: rows `in_flight`, and weight
    gradients that were put off, with what they keep. `departs` is the most until all have departed
    that the gradient of the outputs is needed for."""

    departing_peak: int
    peak: int
    in_flight: int
    deferred: int


def bytes_in_flight(chunks: Sequence[DispatchChunk]) -> int:
    """Return what is under way when the first chunk is waited for."""
    return sum(one.dispatch.in_flight for one in chunks[:2])


def forward_bytes(chunks: Sequence[DispatchChunk], *, graph: bool) -> int:
    """Return the most that there is from the first arrival on; `graph`: what is kept counts."""
    peak = now = bytes_in_flight(chunks)
    before = made = 0
    for place, one in enumerate(chunks):
        if place and place + 1 < len(chunks):
            peak = max(peak, now + chunks[place + 1].dispatch.at_start)
            now += chunks[place + 1].dispatch.in_flight
        now -= one.dispatch.in_flight
        peak = max(peak, now + one.dispatch.at_arrival)
        now += one.dispatch.arrived
        if not graph:
            # Variables live until the next chunk has others.
            now, before = now - before, one.dispatch.arrived
        peak = max(peak, now + one.rows + one.forward)
        now += one.rows - made + graph * 2 * one.inner
        peak = max(peak, now + one.combine.at_start)
        made = 0 if one.combine.holds else one.rows
        now += one.combine.in_flight - one.combine.holds * one.rows
    return max(peak, _awaited([one.combine for one in chunks], now))


def _awaited(transfers: Sequence[TransferBytes], now: int) -> int:
    """Return the most that there is while rows are waited for, one chunk after the other."""
    peak = now
    for one in transfers:
        now -= one.in_flight
        peak = max(peak, now + one.at_arrival)
        now += one.arrived
    together = sum(one.arrived for one in transfers) if len(transfers) > 1 else 0
    return max(peak, now + together)


def backward_bytes(
    chunks: Sequence[DispatchChunk], *, deferred: bool, product: int, split: bool
) -> BackwardRemainder:
    """Return what backward has from the gradient of the outputs to that of rows that leave.

    Weight gradients run when rows are waited for next (or at once, unless `deferred`), with a
    `product` of their own; where backward is `split`, later.
    """
    peak = now = waits = 0
    for one in reversed(chunks):
        peak = max(peak, now + one.back.at_start)
        now += one.back.in_flight
    departs = peak
    for one in reversed(chunks):
        if waits and not split:
            peak = max(peak, now + product)
            now, waits = now - waits, 0
        now -= one.back.in_flight
        peak = max(peak, now + one.back.at_arrival)
        now += one.back.arrived
        given = one.rows + one.gates
        inside = max(one.backward, split * one.collected)
        peak = max(peak, now + given + inside)
        now += given - one.saved
        if deferred or split:
            kept = one.back.arrived + one.saved_rows + 3 * one.inner + one.vectors
            now += kept - one.back.arrived
            waits += kept
        else:
            peak = max(peak, now + one.saved + product)
            now -= one.back.arrived
        peak = max(peak, now + one.last.at_start)
        now += one.last.in_flight - given
    in_flight = now + sum(one.saved for one in chunks) - waits
    return BackwardRemainder(
        departing_peak=departs, peak=peak, in_flight=in_flight, deferred=0 if split else waits
    )


def arrival_bytes(chunks: Sequence[DispatchChunk], left: BackwardRemainder, product: int) -> int:
    """Return the most that there is while the gradients of tokens come, weight gradients first."""
    peak = left.in_flight + left.deferred + (product if left.deferred else 0)
    return max(peak, _awaited([one.last for one in reversed(chunks)], left.in_flight))
