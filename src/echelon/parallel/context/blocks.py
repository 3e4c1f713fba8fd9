"""What one place of a ring holds and passes on: rows of other places, from step to step.

A block is the rows of one owner that are here, in one tensor. What arrives or leaves in one stretch
of it is received into it and sent from it with no copy; the rest is packed.

Shape suffixes: R rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from echelon.core.attention_mask import AttentionMask, Run, cut_runs
from echelon.core.placement import Placement
from echelon.cost.context_routes import Hop, Rows, direct_routes, joined, last_use, ring_routes
from echelon.cost.context_work import halfway
from echelon.parallel.collectives import Group, Pending


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Name the rows of one owner that a tensor holds, in order."""

    rows: Rows
    runs: tuple[Run, ...]

    @property
    def count(self) -> int:
        """Return R."""
        return sum(stop - start for start, stop in self.rows)

    def stretches(self, wanted: Rows) -> list[slice]:
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
    def of(cls, runs: Sequence[Run], rows: Rows) -> BlockRows:
        """Return the rows `rows` of an owner that holds `runs`."""
        return cls(rows, tuple(run for part in rows for run in cut_runs(runs, *part)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Hold all that one place of a ring does: which blocks it has, and what moves at each step."""

    place: int
    degree: int
    own: BlockRows
    blocks: Mapping[int, BlockRows]
    keys: Mapping[int, tuple[Hop, ...]]
    gradients: Mapping[int, tuple[Hop, ...]]
    key_steps: frozenset[int]
    gradient_steps: frozenset[int]
    last_use: Mapping[int, int]
    """owner -> the step whose work or transfer is the last that uses the keys of its block."""
    last_leaving: Mapping[int, int]
    """owner -> the step at which the last gradients of its block leave this place."""
    halfway: int
    """The row of the queries before which half of the work of the own block lies."""

    def owner_at(self, step: int) -> int:
        """Return whose keys this place works on at `step`."""
        return (self.place + step) % self.degree

    def rows_of(self, owner: int) -> BlockRows | None:
        """Return what of an owner is here at some time; None: nothing."""
        return self.own if owner == self.place else self.blocks.get(owner)


@lru_cache(maxsize=64)
def course_of(
    placement: Placement, mask: AttentionMask, place: int, *, direct: bool = False
) -> Course:
    """Return what one place of a ring does, forward and backward."""
    routes = (direct_routes if direct else ring_routes)(placement, mask)
    n, mine = routes.degree, placement.ring_runs(place)
    size = sum(run.count for run in mine)
    blocks: dict[int, BlockRows] = {}
    for owner in range(n):
        rows = joined(
            part
            for hop in (*routes.keys, *routes.gradients)
            if hop.owner == owner != place and place in (hop.source, hop.target)
            for part in hop.rows
        )
        if rows:
            blocks[owner] = BlockRows.of(placement.ring_runs(owner), rows)
    return Course(
        place=place,
        degree=n,
        own=BlockRows(((0, size),), mine),
        blocks=blocks,
        keys=_by_step(routes.keys, place),
        gradients=_by_step(routes.gradients, place),
        key_steps=frozenset(hop.step for hop in routes.keys),
        gradient_steps=frozenset(hop.step for hop in routes.gradients),
        last_use=last_use(routes, place),
        last_leaving={hop.owner: hop.step for hop in routes.gradients if hop.source == place},
        halfway=halfway(mine, mask),
    )


def _by_step(hops: Iterable[Hop], place: int) -> dict[int, tuple[Hop, ...]]:
    found: dict[int, tuple[Hop, ...]] = {}
    for hop in hops:
        if place in (hop.source, hop.target):
            found[hop.step] = (*found.get(hop.step, ()), hop)
    return found


@dataclass(slots=True)
class Transfer:
    """Hold an exchange under way, and what to do with what arrives."""

    pending: Pending
    arrivals: list[tuple[torch.Tensor, list[torch.Tensor], bool]]

    def finish(self) -> None:
        """Return when all rows are in their places: put there, or added to what is there."""
        self.pending.wait()
        for buffer, targets, add in self.arrivals:
            parts = buffer.split([target.shape[0] for target in targets])
            for target, part in zip(targets, parts, strict=True):
                if add:
                    target.add_(part)
                else:
                    target.copy_(part)


def start_transfer(
    hops: Sequence[Hop],
    tensors: Mapping[int, torch.Tensor],
    course: Course,
    ring: Group,
    *,
    name: str,
    add: bool,
) -> Transfer:
    """Start to send and receive the rows of `hops`: from and into the tensors of their owners.

    With `add`, what arrives is added to what is there. A pair of places has one message each way.
    """
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    for hop in hops:
        rows = course.rows_of(hop.owner)
        assert rows is not None, "a hop names rows that this place holds"
        parts = [tensors[hop.owner][place] for place in rows.stretches(hop.rows)]
        if hop.source == course.place:
            outgoing.setdefault(hop.target, []).extend(parts)
        else:
            incoming.setdefault(hop.source, []).extend(parts)
    sends = {
        to: (parts[0] if len(parts) == 1 else torch.cat(parts)) for to, parts in outgoing.items()
    }
    receives: dict[int, torch.Tensor] = {}
    arrivals: list[tuple[torch.Tensor, list[torch.Tensor], bool]] = []
    for source, parts in incoming.items():
        if len(parts) == 1 and not add:
            receives[source] = parts[0]
            continue
        rows_R = sum(part.shape[0] for part in parts)
        receives[source] = parts[0].new_empty((rows_R, *parts[0].shape[1:]))
        arrivals.append((receives[source], parts, add))
    return Transfer(ring.exchange(sends, receives, name=name), arrivals)
