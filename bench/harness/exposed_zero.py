"""How much transfer time sharing out optimizer state, gradients and parameters forces on a step.

As in `exposed.py`, but a step also gathers what it computes with. Between two hosts the
uplink of each carries half of what is gathered and half of what is reduced, whatever the number of
ranks inside: sums can be made inside a host first, and what a host holds it need not be sent.

Stages 1 and 2 gather the parameters after the update, in the order of the next forward pass, which
may begin with the first of them. Stage 3 gathers each unit (the embedding, a block, the head) once
the unit before it begins to compute, so that no more than two are ever whole, and the blocks once
more for backward. The head is used at the end of forward and at the start of backward, the lookup
of the embedding has no use for values in backward: nothing forces either to be gathered twice.
Gathers go before gradients on the link, for compute waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.harness.hosts import Link
from bench.harness.spec import Mode, Size
from bench.harness.work import ELEMENT_BYTES, NUM_HOSTS, Work, backward_of_block, work_of

Piece = tuple[float, float]
"""Multiply-adds per token, and the weights whose gradients exist after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """What is gathered at a time, and what it computes."""

    weights: float
    forward: float
    backward: tuple[Piece, ...]


class _Uplink:
    """A link that sends gathers first, and gradients as soon as they exist while it is free."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._waiting: list[tuple[float, float]] = []

    def gather(self, ready: float, count: float) -> float:
        """Send `count` bytes that may go from `ready` on; return when they are there."""
        self._send_gradients(until=ready)
        self._free = max(self._free, ready) + count / self._rate
        return self._free

    def scatter(self, ready: float, count: float) -> None:
        """Send `count` bytes of gradients that exist from `ready` on, when nothing else goes."""
        self._waiting.append((ready, count))

    def finish(self) -> float:
        """Return when everything has been sent."""
        self._send_gradients(until=float("inf"))
        return self._free

    def _send_gradients(self, *, until: float) -> None:
        while self._waiting and max(self._free, self._waiting[0][0]) < until:
            ready, count = self._waiting.pop(0)
            self._free = max(self._free, ready) + count / self._rate


def forced_by_zero(size: Size, mode: Mode, link: Link, compute_s: float) -> float:
    """Return the seconds that stage 1, 2 or 3 over two hosts must add to a step."""
    work = work_of(size)
    uplink = _Uplink(link.bytes_per_s)
    second_per_mac = compute_s / work.step
    units = _units(size, work)
    ready, now = 0.0, 0.0
    for unit in units:
        there = uplink.gather(ready, _crossing(unit.weights))
        begins = max(now, there)
        ready = begins if mode.zero_stage == 3 else 0.0
        now = begins + unit.forward * second_per_mac
    for index, unit in reversed(list(enumerate(units))):
        if mode.zero_stage == 3 and 0 < index < len(units) - 1:
            now = max(now, uplink.gather(ready, _crossing(unit.weights)))
        if index < len(units) - 1:
            ready = now
        for macs, weights in unit.backward:
            now += macs * second_per_mac
            uplink.scatter(now, _crossing(weights))
    return max(uplink.finish(), now) - compute_s


def _units(size: Size, work: Work) -> list[_Unit]:
    table = float(size.vocab * size.hidden)
    block = _Unit(
        weights=work.projections + work.mlp,
        forward=work.layer_forward,
        backward=tuple(backward_of_block(work)),
    )
    return [
        _Unit(weights=table, forward=0.0, backward=((0.0, table),)),
        *[block] * size.layers,
        _Unit(weights=work.head, forward=work.head, backward=((2 * work.head, work.head),)),
    ]


def _crossing(weights: float) -> float:
    """Return the bytes that leave each host when `weights` elements are gathered or summed."""
    return weights * ELEMENT_BYTES * (NUM_HOSTS - 1) / NUM_HOSTS
