# SPDX-License-Identifier: Apache-2.0
"""Parameters of a rank that are whole at stage 3, unit by unit (`parallel/zero.py`).

A unit is gathered before its forward and before its backward, with those that the plan prefetches;
it goes after the last unit of the pass that uses its bucket. Without `reshard_after_forward` all
that was gathered stays until the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from echelon.core.plan import Plan
from echelon.cost.bytes.quantised import gathered_element_bytes, int8_message_bytes
from echelon.layout.buckets import UNIT_EMBEDDING, BucketPlan, stage_units
from echelon.layout.secondary import secondary_elements
from echelon.layout.stage import RankPart

WholeState: TypeAlias = tuple[frozenset[tuple[str, int]], frozenset[str], frozenset[str], int]
"""All that decides what comes next of whole units."""


class WholeUnits:
    """Count the bytes of units that are whole."""

    def __init__(self, plan: Plan, part: RankPart, buckets: Sequence[BucketPlan]) -> None:
        """Begin with slices only."""
        zero = plan.layout.zero
        self._ahead, self._frees = zero.prefetch, zero.reshard_after_forward
        self._plan = plan
        self._order = {unit: units for units in map(stage_units, part.stages) for unit in units}
        sliced = [bucket for bucket in buckets if bucket.sliced]
        self._used = {unit: [b for b in sliced if unit in b.units] for unit in self._order}
        self._present: dict[str, int] = {}
        self._offloaded = zero.parameter_offload != "none"
        self._reads: set[str] = set()
        self._kept: set[str] = set()
        self.any = bool(sliced)
        """Whether anything is gathered."""
        self.most_reads = 0
        """The most slices that are on their way from where they rest, or there, at a time."""

    @property
    def bytes(self) -> int:
        """Return the bytes that are whole now."""
        return sum(self._present.values())

    def state(self) -> WholeState:
        """Return all that decides what comes next."""
        present = frozenset(self._present.items())
        return present, frozenset(self._reads), frozenset(self._kept), self.most_reads

    def restore(self, state: WholeState) -> None:
        """Go back to a state."""
        present, reads, kept, self.most_reads = state
        self._present, self._reads, self._kept = dict(present), set(reads), set(kept)

    def enter(self, unit: str) -> None:
        """Learn that the forward pass of a unit begins."""
        self._gather(unit, self._order.get(unit, ()))

    def leave(self, unit: str) -> None:
        """Learn that the forward pass of a unit is over."""
        for bucket in self._used.get(unit, ()) if self._frees else ():
            if self._in_stage(unit, bucket.units)[-1] == unit:
                self._free(bucket)

    def enter_backward(self, unit: str) -> None:
        """Learn that the backward pass of a unit begins."""
        if unit != UNIT_EMBEDDING and self._frees:
            self._gather(unit, self._order.get(unit, ())[::-1], backward=True)

    def leave_backward(self, unit: str) -> None:
        """Learn that the backward pass of a unit is over."""
        if unit == UNIT_EMBEDDING:
            return
        for bucket in self._used.get(unit, ()) if self._frees else ():
            if self._in_stage(unit, bucket.backward_units)[0] == unit:
                self._free(bucket)

    def end_pass(self) -> None:
        """Learn that a step is over."""
        self._present.clear()
        self._reads.clear()
        self._kept.clear()

    def _gather(self, unit: str, order: Sequence[str], *, backward: bool = False) -> None:
        if unit not in order or (backward and not self._used[unit]):
            return
        here = order.index(unit)
        last = here + 1 + self._ahead
        units = [one for one in order[here:] if not (backward and one == UNIT_EMBEDDING)]
        ahead = [one for one in order[here:last] if one in units]
        for bucket in (bucket for coming in ahead for bucket in self._used[coming]):
            self._read(bucket)
            values = bucket.num_elements * gathered_element_bytes(self._plan, bucket)
            if not self._known(bucket):
                values += int8_message_bytes(self._plan, bucket)
            self._present.setdefault(bucket.name, values)
        for coming in order[last : last + 1]:
            for bucket in self._used[coming] if coming in units else ():
                self._read(bucket)
        for bucket in self._used[unit]:
            self._reads.discard(bucket.name)
            self._keep(bucket)

    def _keep(self, bucket: BucketPlan) -> None:
        """Learn that a bucket has arrived: where a node keeps it, it is not read again.

        What came in int8 has become parameters.
        """
        values = bucket.num_elements * gathered_element_bytes(self._plan, bucket)
        self._present[bucket.name] = values
        if secondary_elements(self._plan, bucket):
            self._kept.add(bucket.name)

    def _read(self, bucket: BucketPlan) -> None:
        if self._offloaded and not self._known(bucket):
            self._reads.add(bucket.name)
            self.most_reads = max(self.most_reads, len(self._reads))

    def _known(self, bucket: BucketPlan) -> bool:
        """Return whether a bucket is whole, or its node has it."""
        return bucket.name in self._present or bucket.name in self._kept

    def _free(self, bucket: BucketPlan) -> None:
        self._reads.discard(bucket.name)
        self._present.pop(bucket.name, None)

    def _in_stage(self, unit: str, units: Sequence[str]) -> list[str]:
        return [other for other in units if other in self._order[unit]]
