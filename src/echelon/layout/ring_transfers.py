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

Of one place, `RingPlan` has the blocks that it holds and passes on, from step to step: a block is
the rows of one owner that are here, in one tensor, of R rows.

`resident_rows` counts the rows of other places that it holds. Rows of keys (and values) are there
from the step before they are worked on, while they travel, until they have been worked on and
handed on: so besides its own chunk a place has the one at work and the next one. Waiting for each
transfer instead would leave out the next one, and hide nothing. Gradients of another's rows are
there from the first that is added until all have left; gradients that arrive are received beside
them, to be added. Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023, section
3: the buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from echelon.core.attention_mask import AttentionMask, Placement, PositionRun, cut_position_runs
from echelon.layout.context_work import half_work_row

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


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Name the rows of one owner that a tensor holds, in order."""

    rows: RowRanges
    runs: tuple[PositionRun, ...]

    @property
    def count(self) -> int:
        """Return R."""
        return sum(stop - start for start, stop in self.rows)

    def slices_of(self, wanted: RowRanges) -> list[slice]:
        """Return where in the tensor the `wanted` rows of the owner are, as few slices."""
        found: list[slice] = []
        for start, stop in wanted:
            before = 0
            for first, last in self.rows:
                if first <= start and stop <= last:
                    place = slice(before + start - first, before + stop - first)
                    if found and found[-1].stop == place.start:
                        place = slice(found.pop().start, place.stop)
                    found.append(place)
                    break
                before += last - first
            else:
                raise AssertionError(f"rows {start} to {stop} are not in {self.rows}")
        return found

    @classmethod
    def from_rows(cls, runs: Sequence[PositionRun], rows: RowRanges) -> BlockRows:
        """Return the rows `rows` of an owner that holds `runs`."""
        return cls(rows, tuple(run for part in rows for run in cut_position_runs(runs, *part)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlan:
    """Hold all that one place of a ring does: which blocks it has, and what moves at each step."""

    ring_rank: int
    """This place in the ring."""
    degree: int
    """Places of the ring."""
    own: BlockRows
    """The rows of the block of this place."""
    blocks: Mapping[int, BlockRows]
    """owner -> the rows of its block that come here."""
    keys: Mapping[int, tuple[RowTransfer, ...]]
    """step -> the transfers of keys and values."""
    gradients: Mapping[int, tuple[RowTransfer, ...]]
    """step -> the transfers of their gradients."""
    key_steps: frozenset[int]
    """The steps at which keys move anywhere in the ring."""
    gradient_steps: frozenset[int]
    """The steps at which gradients move anywhere in the ring."""
    last_use: Mapping[int, int]
    """owner -> the step whose work or transfer is the last that uses the keys of its block."""
    last_leaving: Mapping[int, int]
    """owner -> the step at which the last gradients of its block leave this place."""
    halfway: int
    """The row of the queries before which half of the work of the own block lies."""

    def owner_at(self, step: int) -> int:
        """Return whose keys this place works on at `step`."""
        return (self.ring_rank + step) % self.degree

    def rows_from(self, owner: int) -> BlockRows | None:
        """Return what of an owner is here at some time; None: nothing."""
        return self.own if owner == self.ring_rank else self.blocks.get(owner)


@lru_cache(maxsize=64)
def ring_plan(
    placement: Placement, mask: AttentionMask, place: int, *, direct: bool = False
) -> RingPlan:
    """Return what one place of a ring does, forward and backward."""
    routes = (direct_transfers if direct else ring_transfers)(placement, mask)
    n, mine = routes.degree, placement.ring_runs(place)
    size = sum(run.count for run in mine)
    blocks: dict[int, BlockRows] = {}
    for owner in range(n):
        rows = merge_ranges(
            part
            for transfer in (*routes.keys, *routes.gradients)
            if transfer.owner == owner != place and place in (transfer.source, transfer.target)
            for part in transfer.rows
        )
        if rows:
            blocks[owner] = BlockRows.from_rows(placement.ring_runs(owner), rows)
    return RingPlan(
        ring_rank=place,
        degree=n,
        own=BlockRows(((0, size),), mine),
        blocks=blocks,
        keys=_by_step(routes.keys, place),
        gradients=_by_step(routes.gradients, place),
        key_steps=frozenset(transfer.step for transfer in routes.keys),
        gradient_steps=frozenset(transfer.step for transfer in routes.gradients),
        last_use=last_use(routes, place),
        last_leaving={
            transfer.owner: transfer.step
            for transfer in routes.gradients
            if transfer.source == place
        },
        halfway=half_work_row(mine, mask),
    )


def _by_step(transfers: Iterable[RowTransfer], place: int) -> dict[int, tuple[RowTransfer, ...]]:
    found: dict[int, tuple[RowTransfer, ...]] = {}
    for transfer in transfers:
        if place in (transfer.source, transfer.target):
            found[transfer.step] = (*found.get(transfer.step, ()), transfer)
    return found
