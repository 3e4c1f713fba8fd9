# SPDX-License-Identifier: Apache-2.0
"""Which rows of other places a place of a ring holds, step by step.

Rows of keys (and values) are there from the step before they are worked on, while they travel,
until they have been worked on and handed on: so besides its own chunk a place has the one at work
and the next one. Waiting for each transfer instead would leave out the next one, and hide nothing.
Gradients of another's rows are there from the first that is added until all have left; what arrives
is received beside them, to be added.

Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023, section 3: the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from echelon.core.attention_mask import AttentionMask, Placement
from echelon.layout.ring_transfers import (
    RowRanges,
    RowTransfer,
    last_use,
    merge_ranges,
    num_rows,
    ring_transfers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRows:
    """Count, in rows, what a place has at one step beside its own keys.

    `working` are the keys that it works on, `keys` all that are there, those on their way too, and
    `key_copies` the copies of them that are packed to be sent or wait to be put in their places.
    `gradients` are sums of gradients, its own too, and `gradient_copies` what is sent or received
    beside them. The step after the last has gradients only: those that come home.
    """

    step: int
    working: int
    keys: int
    key_copies: int
    gradients: int
    gradient_copies: int


@lru_cache(maxsize=256)
def resident_rows(
    placement: Placement, mask: AttentionMask, place: int
) -> tuple[ResidentRows, ...]:
    """Return what a place of a ring holds of other places at each step, in backward; 0 to n.

    Forward has the same keys, and no gradients.
    """
    n, own = placement.ring_degree, placement.length // placement.ring_degree
    routes = ring_transfers(placement, mask)
    keys, gradients = routes.at(place)
    rows = {owner: _rows((*keys, *gradients), owner) for owner in range(n) if owner != place}
    until = last_use(routes, place)
    arriving = {
        owner: [one.step for one in keys if (one.owner, one.target) == (owner, place)]
        for owner in rows
    }
    there = {owner: (min(steps) - 1, until[owner]) for owner, steps in arriving.items() if steps}
    summed = {
        owner: (
            min(
                [transfer.step for transfer in gradients if transfer.owner == owner]
                + [(owner - place) % n]
            ),
            max(
                transfer.step
                for transfer in gradients
                if (transfer.owner, transfer.source) == (owner, place)
            ),
        )
        for owner in there
    }
    found: list[ResidentRows] = []
    for step in range(n + 1):
        owner = (place + step) % n
        found.append(
            ResidentRows(
                step=step,
                working=rows[owner] if owner != place and owner in there else 0,
                keys=sum(rows[o] for o, (a, b) in there.items() if a <= step <= b),
                key_copies=_copies(keys, place, step + 1, adds=False),
                gradients=own + sum(rows[o] for o, (a, b) in summed.items() if a <= step <= b),
                gradient_copies=_copies(gradients, place, step, adds=True),
            )
        )
    return tuple(found)


def resident_chunks(placement: Placement, mask: AttentionMask, *, overlapped: bool = True) -> float:
    """Return the most keys that a place holds at a time, its own too, in chunks of T / n rows.

    Not `overlapped`: where the next chunk comes only when this one has been worked on.
    """
    own = placement.length // placement.ring_degree
    most = max(
        one.keys if overlapped else one.working
        for place in range(placement.ring_degree)
        for one in resident_rows(placement, mask, place)
    )
    return 1 + most / own


def gathered_chunks(placement: Placement, mask: AttentionMask) -> float:
    """Return the most keys that a place holds where they are gathered, in chunks of T / n rows."""
    n = placement.ring_degree
    if mask.window is None:
        return n
    most = max(map(ring_transfers(placement, mask).needed_rows, range(n)))
    return 1 + most * n / placement.length


def _rows(transfers: Iterable[RowTransfer], owner: int) -> int:
    """Return how many rows of an owner the hops name."""
    return num_rows(
        merge_ranges(
            part for transfer in transfers if transfer.owner == owner for part in transfer.rows
        )
    )


def _copies(transfers: Sequence[RowTransfer], place: int, step: int, *, adds: bool) -> int:
    """Return the rows that are packed, or received to be put in place, at one step, at most.

    What travels between two places in one piece is sent from where it is, and received there too
    unless it is to be added.
    """
    ways: dict[tuple[int, int], list[RowRanges]] = {}
    for transfer in transfers:
        if transfer.step == step:
            ways.setdefault((transfer.source, transfer.target), []).append(transfer.rows)
    return sum(
        sum(map(num_rows, moving))
        for (_, target), moving in ways.items()
        if sum(len(rows) for rows in moving) > 1 or (adds and target == place)
    )
