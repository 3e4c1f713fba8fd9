# SPDX-License-Identifier: Apache-2.0
"""Buckets of a rank in a step: parameters that are whole, gradients that fill and are summed.

Parameters at stage 3 (`WholeUnits`, of `parallel/zero.py`): a unit is gathered before its forward
and before its backward, with those that the plan prefetches; it goes after the last unit of the
pass that uses its bucket. Without `reshard_after_forward` all that was gathered stays until the
step ends.

Gradients beside the model state, write by write (`GradientSums`, of `parallel/data.py`): where
gradients add up in slices, a bucket is whole from the first gradient of a microbatch until its sum
has left. A sum that is under way has copies beside: the bucket in the dtype of the reduction where
that is another, and the slice that is to be added or rounded. The third sum ends the first, where
they have any copy or a hop to come; later hops (replicas, tensor ranks, both ends) end when
backward is over. The second of two hops of codes begins with the sum after it, or where backward is
over. Where messages sum, what arrives lands beside, one sum of a group at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from echelon.core.parameters import EMBEDDING
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.quantised import (
    encoding_bytes,
    ending_bytes,
    gathered_element_bytes,
    int8_message_bytes,
    quantised_sum_copies,
    second_hop_bytes,
    second_hop_copies,
)
from echelon.cost.bytes.transient import (
    BUCKETS_IN_FLIGHT,
    ArrivingSum,
    adds_slices_itself,
    arriving_sums,
)
from echelon.layout.buckets import (
    UNIT_EMBEDDING,
    BucketPlan,
    accumulates_slices,
    shard_degree,
    slice_elements,
    stage_units,
    zero_stage,
)
from echelon.layout.data_groups import secondary_elements
from echelon.layout.slots import trained_buckets
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedBucket:
    """Say what of a bucket is there while it fills and while it is summed, in bytes."""

    plan: BucketPlan
    """The bucket."""
    contributions: int
    """Gradients that a microbatch writes into it."""
    adds: bool
    """Whether microbatches add up in its slice."""
    whole: int
    """Its gradients, where they are whole only while it fills; else 0."""
    cast: int
    """The copy of it on the wire, in another dtype; else 0."""
    slice: int
    """Its slice in the dtype of the reduction; 0 where nothing is cut."""
    others: int
    """Slices of others that a rank adds up itself (Gloo), or codes of slices, both ways."""
    alone: bool
    """Whether nobody has other slices: the cast goes as soon as the slice is there."""
    casts: bool
    """Whether it is summed in another dtype than it adds up in."""
    first: int
    """What comes on top while codes are made for it; else 0."""
    second: int
    """What comes on top while the second hop of a sum begins; else 0."""
    far: int
    """What is there in place of `others` while that hop is under way; else 0."""
    ending: int
    """What comes on top while that hop ends; else 0."""
    hops: int
    """Sums over other axes that follow in the last microbatch."""
    arriving: tuple[ArrivingSum, ...] = ()
    """What lands beside it where it is summed by messages, until backward is over."""

    @classmethod
    def from_plan(cls, plan: Plan, part: RankPart, bucket: BucketPlan) -> SummedBucket:
        """Return what a plan does with a bucket."""
        precision, expert = plan.mathematics.precision, bucket.expert
        casts = precision.reduction != precision.gradients
        size, wire = DTYPE_BYTES[precision.gradients], DTYPE_BYTES[precision.reduction]
        stage, adds = zero_stage(plan, expert=expert), accumulates_slices(plan, expert=expert)
        cut = slice_elements(plan, bucket) * wire if stage else 0
        itself = adds_slices_itself(plan, expert)
        codes = quantised_sum_copies(plan, bucket)
        sizes = [plan.mesh.dp_replicate if stage else 1, 2 if part.mirrored else 1]
        sizes.append(plan.mesh.tp if bucket.kind == "partial" else 1)
        sizes.append(2 if bucket.kind == "tied" else 1)
        return cls(
            plan=bucket,
            contributions=_contributions(plan, part, bucket),
            adds=adds,
            whole=bucket.num_elements * size if adds else 0,
            # Codes are made of gradients as they are.
            cast=bucket.num_elements * wire if casts and not codes else 0,
            slice=cut,
            others=codes or ((shard_degree(plan, expert=expert) - 1) * cut if itself else 0),
            alone=stage > 0 and shard_degree(plan, expert=expert) == 1,
            casts=casts,
            # Room for what is received comes when codes are made.
            first=max(0, encoding_bytes(plan, bucket) - codes // 2),
            # What was sent is gone by then.
            second=max(0, second_hop_copies(plan, bucket) - codes // 2),
            far=second_hop_bytes(plan, bucket),
            ending=ending_bytes(plan, bucket),
            hops=sum(size > 1 for size in sizes),
            arriving=arriving_sums(plan, part, bucket),
        )


def _contributions(plan: Plan, part: RankPart, bucket: BucketPlan) -> int:
    """Return how many gradients a microbatch of one stage writes into a bucket."""
    both_ends = plan.model.tied and any(stage.first and stage.last for stage in part.stages)
    uses = plan.layout.experts.chunks if bucket.expert else 1
    return len(bucket.names) * uses + (both_ends and EMBEDDING in bucket.names)


@dataclass(frozen=True, slots=True)
class _Sum:
    bucket: SummedBucket
    held: int
    hops: int
    begun: bool = False
    """Whether the second of its hops of codes is under way."""


SumsState: TypeAlias = tuple[
    frozenset[str],
    frozenset[tuple[str, int]],
    frozenset[int],
    frozenset[str],
    frozenset[str],
    tuple[tuple[str, int, int, bool], ...],
    tuple[tuple[tuple[int, ...], int], ...],
    tuple[int, int, int],
]
"""All that decides what comes next of sums."""


class GradientSums:
    """Count the bytes of buckets that fill and are summed; the most of them since it was asked."""

    def __init__(self, plan: Plan, part: RankPart, buckets: Sequence[BucketPlan]) -> None:
        """Begin a step with nothing under way."""
        found = [SummedBucket.from_plan(plan, part, one) for one in trained_buckets(buckets)]
        self._of = {name: one for one in found for name in one.plan.names}
        self._by_name = {one.plan.name: one for one in found}
        self._by_stage: dict[int, list[SummedBucket]] = {}
        for one in found:
            for stage in one.plan.stages:
                self._by_stage.setdefault(stage, []).append(one)
        self._copies = any(one.casts or one.adds or one.others for one in found)
        self._present: set[str] = set()
        self._missing: Counter[str] = Counter()
        self._ended: set[int] = set()
        self._finished: set[str] = set()
        self._ends: set[str] = set()
        self._under_way: deque[_Sum] = deque()
        self._later = 0
        self._arriving: dict[tuple[int, ...], int] = {}
        self.bytes = self._most = 0

    @property
    def takes_part(self) -> bool:
        """Return whether writing gradients changes anything: a bucket fills, or will be summed."""
        return any(self._missing.values())

    def start_backward(self, stage: int, *, last: bool) -> None:
        """Begin to take the gradients of a microbatch on a stage; `last`: of its last one."""
        if last:
            self._ended.add(stage)
        for one in self._by_stage.get(stage, ()):
            name = one.plan.name
            ends = self._ended.issuperset(one.plan.stages)
            if ends:
                self._ends.add(name)
            self._missing[name] = one.contributions if ends or one.adds else 0

    def write(self, name: str, count: int = 1) -> None:
        """Learn that a gradient is written, and so many in all of its bucket one by one."""
        one = self._of[name]
        bucket = one.plan.name
        while count:
            if one.adds:
                while any(other.bucket is one for other in self._under_way):
                    self._finish(self._under_way.popleft())
                if bucket not in self._present:
                    self._present.add(bucket)
                    self._add(one.whole)
            now = min(count, self._missing[bucket])
            if now <= 0:
                return
            self._missing[bucket] -= now
            count -= now
            if not self._missing[bucket]:
                self._is_full(one)

    def state(self) -> SumsState:
        """Return all that decides what comes next."""
        return (
            frozenset(self._present),
            frozenset((name, left) for name, left in self._missing.items() if left > 0),
            frozenset(self._ended),
            frozenset(self._finished),
            frozenset(self._ends),
            tuple((one.bucket.plan.name, one.held, one.hops, one.begun) for one in self._under_way),
            tuple(self._arriving.items()),
            (self._later, self.bytes, self._most),
        )

    def restore(self, state: SumsState) -> None:
        """Go back to a state."""
        present, missing, ended, finished, ends, under_way, arriving, counts = state
        self._present, self._missing = set(present), Counter(dict(missing))
        self._ended, self._finished, self._ends = set(ended), set(finished), set(ends)
        self._under_way = deque(
            _Sum(self._by_name[name], held, hops, begun) for name, held, hops, begun in under_way
        )
        self._arriving = dict(arriving)
        self._later, self.bytes, self._most = counts

    def finish(self) -> None:
        """Learn that backward is over."""
        for place in range(len(self._under_way)):
            self._begin_second_hop(place)
        while self._under_way:
            self._finish(self._under_way.popleft())
        self._add(-self._later - sum(self._arriving.values()))
        self._later = 0
        self._arriving.clear()

    def most(self) -> int:
        """Return the most bytes since this was asked last."""
        most, self._most = self._most, self.bytes
        return most

    def _add(self, count: int) -> None:
        self.bytes += count
        self._most = max(self._most, self.bytes)

    def _is_full(self, one: SummedBucket) -> None:
        name = one.plan.name
        last = name in self._ends
        added = one.adds and name in self._finished
        self._finished.add(name)
        held = one.cast + one.others + (one.slice if added or one.casts else 0)
        self._add(held + one.first)
        self._add(-one.first)
        for landing in one.arriving:
            if last or landing.each_time:
                here = self._arriving.get(landing.ranks, 0)
                self._arriving[landing.ranks] = max(here, landing.bytes)
                self._add(self._arriving[landing.ranks] - here)
        if one.alone:
            held -= one.cast
            self._add(-one.cast)
        self._under_way.append(_Sum(one, held, one.hops if last else 0))
        if len(self._under_way) > 1:
            self._begin_second_hop(-2)
        while (beyond := len(self._under_way) - BUCKETS_IN_FLIGHT) > 0 and (
            self._copies or any(one.hops for one in islice(self._under_way, beyond))
        ):
            self._finish(self._under_way.popleft())

    def _begin_second_hop(self, place: int) -> None:
        self._under_way[place] = self._begun(self._under_way[place])

    def _begun(self, one: _Sum) -> _Sum:
        """Return a sum with its second hop under way, where it has one."""
        bucket = one.bucket
        if one.begun or not bucket.far:
            return one
        self._add(bucket.second)
        self._add(bucket.far - bucket.others - bucket.second)
        return replace(one, held=one.held + bucket.far - bucket.others, begun=True)

    def _finish(self, one: _Sum) -> None:
        one = self._begun(one)
        bucket = one.bucket
        self._add(bucket.ending)
        self._add(-bucket.ending)
        if bucket.adds and bucket.plan.name in self._present:
            self._present.discard(bucket.plan.name)
            self._add(-bucket.whole)
        self._add(-one.held)
        if one.hops and bucket.casts:
            copied = bucket.slice or bucket.cast
            self._later += copied
            self._add(copied)
