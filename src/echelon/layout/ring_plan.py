# SPDX-License-Identifier: Apache-2.0
"""What one place of a ring holds and passes on: rows of other places, from step to step.

A block is the rows of one owner that are here, in one tensor, of R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from echelon.core.attention_mask import AttentionMask, Placement, PositionRun, cut_position_runs
from echelon.layout.context_work import half_work_row
from echelon.layout.ring_transfers import (
    RowRanges,
    RowTransfer,
    direct_transfers,
    last_use,
    merge_ranges,
    ring_transfers,
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
