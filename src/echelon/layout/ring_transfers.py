# SPDX-License-Identifier: Apache-2.0
"""Which keys travel from where to where on a ring of context ranks, and which gradients come back.

At step e of n - 1, place r of a ring works on the keys of place (r + e) mod n. A *visit* is that a
place needs some rows of another: none where the mask hides all of them. The rows of a chunk go from
their owner to its visitors in the order of their steps, each handing on what the later ones need;
so where all are needed they go from neighbour to neighbour, and where they are not, no further than
they must, past places that have no use for them. The gradients of those rows are added up along the
same way and go home from the last visitor.

A window needs exact rows, every other mask whole chunks. Documents are data: they change what is
computed, not what is sent. Rows are those of the owner's place, in the order of its runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from echelon.core.attention_mask import AttentionMask, Placement

RowRanges = tuple[tuple[int, int], ...]
"""Ranges of rows: ascending, disjoint, not touching."""

RowRange = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTransfer:
    """Name rows of `owner` that go from one place to another, to be there at step `step`.

    Gradients that go home at step e are there when the owner has computed its step e; step n is
    after all of them.
    """

    step: int
    source: int
    target: int
    owner: int
    rows: RowRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTransfers:
    """Hold all hops of keys (and values), and of their gradients, in the order of their steps."""

    degree: int
    keys: tuple[RowTransfer, ...]
    gradients: tuple[RowTransfer, ...]
    needs: Mapping[tuple[int, int], RowRanges]
    """(place, owner) -> the rows of the owner that the place needs."""

    def needed_rows(self, place: int) -> int:
        """Return how many rows of others a place needs."""
        return sum(num_rows(rows) for (who, _), rows in self.needs.items() if who == place)

    def at(self, place: int) -> tuple[tuple[RowTransfer, ...], tuple[RowTransfer, ...]]:
        """Return the hops of keys, and those of gradients, that leave a place or arrive there."""
        keys = tuple(one for one in self.keys if place in (one.source, one.target))
        return keys, tuple(one for one in self.gradients if place in (one.source, one.target))


@lru_cache(maxsize=64)
def ring_transfers(placement: Placement, mask: AttentionMask) -> RingTransfers:
    """Return the hops between the places of a ring."""
    n = placement.ring_degree
    keys: dict[tuple[int, int, int, int], list[RowRange]] = defaultdict(list)
    gradients: dict[tuple[int, int, int, int], list[RowRange]] = defaultdict(list)
    needs: dict[tuple[int, int], list[RowRange]] = defaultdict(list)
    for owner in range(n):
        for visits in _visits(placement, mask, owner):
            places = [owner, *visits, owner]
            steps = [0, *((owner - place) % n for place in visits)]
            ranges = list(visits.values())
            for i, place in enumerate(visits):
                needs[place, owner].append(ranges[i])
                keys[steps[i + 1], places[i], place, owner].extend(ranges[i:])
                home = steps[i + 1] + 1 if place == places[-2] else steps[i + 2]
                gradients[home, place, places[i + 2], owner].extend(ranges[: i + 1])
    return RingTransfers(
        degree=n,
        keys=_row_transfers(keys),
        gradients=_row_transfers(gradients),
        needs={pair: merge_ranges(ranges) for pair, ranges in needs.items()},
    )


@lru_cache(maxsize=64)
def direct_transfers(placement: Placement, mask: AttentionMask) -> RingTransfers:
    """Return the hops where every place gets what it needs from its owner, all at once."""
    n = placement.ring_degree
    needs = ring_transfers(placement, mask).needs
    return RingTransfers(
        degree=n,
        keys=tuple(
            RowTransfer(step=1, source=owner, target=place, owner=owner, rows=rows)
            for (place, owner), rows in needs.items()
        ),
        gradients=tuple(
            RowTransfer(step=n, source=place, target=owner, owner=owner, rows=rows)
            for (place, owner), rows in needs.items()
        ),
        needs=needs,
    )


def last_use(routes: RingTransfers, place: int) -> dict[int, int]:
    """Return, by owner, the step whose work or transfer at `place` uses its keys last."""
    last = {(place + step) % routes.degree: step for step in range(routes.degree)}
    for transfer in routes.keys:
        if transfer.source == place:
            # What is to be there at a step is on its way during the step before.
            last[transfer.owner] = max(last[transfer.owner], transfer.step - 1)
    return last


def num_rows(rows: RowRanges) -> int:
    """Return how many rows there are."""
    return sum(stop - start for start, stop in rows)


def merge_ranges(ranges: Iterable[RowRange]) -> RowRanges:
    """Return ranges in order, those that touch or overlap as one."""
    found: list[RowRange] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def _visits(placement: Placement, mask: AttentionMask, owner: int) -> Iterable[dict[int, RowRange]]:
    """Yield, for each chunk of a place, who needs which rows of it, by step."""
    n = placement.ring_degree
    first = 0
    for run in placement.ring_runs(owner):
        visits: dict[int, RowRange] = {}
        for step in range(1, n):
            place = (owner - step) % n
            met = [
                mask.band(queries, run).keys(queries.count, run.count)
                for queries in placement.ring_runs(place)
            ]
            met = [(start, stop) for start, stop in met if start < stop]
            if met:
                start, stop = min(a for a, _ in met), max(b for _, b in met)
                if mask.window is None:
                    start, stop = 0, run.count
                visits[place] = (first + start, first + stop)
        yield visits
        first += run.count


def _row_transfers(
    found: Mapping[tuple[int, int, int, int], list[RowRange]],
) -> tuple[RowTransfer, ...]:
    return tuple(
        RowTransfer(step=step, source=source, target=target, owner=owner, rows=merge_ranges(ranges))
        for (step, source, target, owner), ranges in sorted(found.items())
    )
