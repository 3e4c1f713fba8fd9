"""Bytes that each rank holds between steps, by kind and pool: equal to what the run holds.

Parameters, gradients, master copies and optimizer state are exact, padding of buckets and of the
vocabulary included and told. In mixed precision with Adam they are the 2 + 2 + 12 bytes a weight of
the ZeRO paper (Rajbhandari et al., 2020, section 3.1), each whole or a slice of 1/N as the stage
says: 16 psi, 4 psi + 12 psi/N, 2 psi + 14 psi/N, 16 psi/N (`cost/model_states.py`).

Not counted: a few numbers for each layer or bucket, such as the biases and the last shares of the
experts of a router (2 E of them).

What exists only while a step runs is bounded by `cost/transient.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, DType, Home, Plan
from echelon.cost.buckets import (
    BucketPlan,
    accumulates_slices,
    plan_buckets,
    slice_elements,
    slice_index,
)
from echelon.cost.slots import SlotRange, slot_ranges
from echelon.cost.stage import held_parameters, pp_rank_of, rank_part
from echelon.cost.terms import HeldTerm, Pool
from echelon.cost.updates import STATE_KINDS

POOLS: dict[Home, Pool] = {"none": "device", "host": "host", "nvme": "nvme"}
"""Where slices rest, for each word of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBucket:
    """Hold a bucket with what is known of its padding: its end, and in padded parameters."""

    plan: BucketPlan
    real_stop: int
    padded: tuple[SlotRange, ...]


def bytes_held(plan: Plan, rank: int) -> tuple[HeldTerm, ...]:
    """Return the model state of `rank` by kind and pool; kinds that it has none of are left out."""
    return held_terms(plan, held_buckets(plan, pp_rank_of(plan, rank)), rank)


def bytes_held_by_pool(plan: Plan, rank: int) -> dict[Pool, int]:
    """Return the bytes of model state that `rank` holds in each pool that it uses."""
    total: dict[Pool, int] = {}
    for term in bytes_held(plan, rank):
        total[term.pool] = total.get(term.pool, 0) + term.bytes
    return total


def held_buckets(plan: Plan, pp_rank: int) -> tuple[HeldBucket, ...]:
    """Return the buckets of a pipeline rank; the same for all that share its place."""
    part = rank_part(plan, pp_rank)
    specs = {spec.name: spec for spec in held_parameters(plan, part)}
    found: list[HeldBucket] = []
    for bucket in plan_buckets(plan, part):
        slots = slot_ranges(plan, bucket, specs)
        padded = tuple(slot for slot in slots if slot.spec.padded)
        found.append(HeldBucket(plan=bucket, real_stop=slots[-1].stop, padded=padded))
    return tuple(found)


def held_terms(plan: Plan, buckets: Sequence[HeldBucket], rank: int) -> tuple[HeldTerm, ...]:
    """Return the model state of `rank`, which has `buckets`, by kind and pool."""
    precision, zero = plan.mathematics.precision, plan.layout.zero
    resting = POOLS[zero.parameter_offload]
    adder = _Adder(plan, rank)
    adder.add(
        "parameters",
        precision.parameters,
        [b for b in buckets if not b.plan.sliced],
        whole=True,
    )
    adder.add(
        "parameters", precision.parameters, [b for b in buckets if b.plan.sliced], pool=resting
    )
    for expert in (False, True):
        whole = not accumulates_slices(plan, expert=expert)
        alike = [bucket for bucket in buckets if bucket.plan.expert is expert]
        adder.add("gradients", precision.gradients, alike, whole=whole)
    pool = POOLS[zero.optimizer_offload]
    if precision.has_master:
        adder.add("master parameters", precision.master, buckets, pool=pool)
    adder.add("optimizer state", precision.master, buckets, pool=pool, times=_num_states)
    return adder.terms()


def _num_states(bucket: BucketPlan) -> int:
    return len(STATE_KINDS[bucket.update])


def _once(bucket: BucketPlan) -> int:
    return 1


@dataclass(slots=True)
class _Sum:
    size: int
    counts: set[int]
    elements: int = 0
    padding: int = 0

    def formula(self) -> str:
        """Return the multiplication; a common number of tensors stands before the elements."""
        if len(self.counts) == 1 and self.counts != {1}:
            (count,) = self.counts
            return f"{count} x {self.elements // count:,} x {self.size}"
        return f"{self.elements:,} x {self.size}"


class _Adder:
    """Add up elements of buckets by kind and pool, for one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        here = plan.mesh.coordinates(rank)
        self._tensor = here[Axis.TP]
        self._index = {expert: slice_index(plan, rank, expert=expert) for expert in (False, True)}
        self._sums: dict[tuple[str, Pool], _Sum] = {}

    def add(
        self,
        name: str,
        dtype: DType,
        buckets: Sequence[HeldBucket],
        *,
        whole: bool = False,
        pool: Pool = "device",
        times: Callable[[BucketPlan], int] = _once,
    ) -> None:
        """Add the whole buckets, or this rank's slices of them, `times` over."""
        if not buckets:
            return
        total = self._sums.setdefault((name, pool), _Sum(DTYPE_BYTES[dtype], set()))
        for bucket in buckets:
            size = slice_elements(self._plan, bucket.plan)
            start, stop = (0, bucket.plan.num_elements)
            if not whole:
                index = self._index[bucket.plan.expert]
                start, stop = index * size, (index + 1) * size
            count = times(bucket.plan)
            total.counts.add(count)
            total.elements += count * (stop - start)
            total.padding += count * self._padding(bucket, start, stop)

    def terms(self) -> tuple[HeldTerm, ...]:
        """Return one term for each kind and pool."""
        return tuple(
            HeldTerm(
                name=name,
                pool=pool,
                bytes=total.elements * total.size,
                padding=total.padding * total.size,
                formula=total.formula(),
            )
            for (name, pool), total in self._sums.items()
        )

    def _padding(self, bucket: HeldBucket, start: int, stop: int) -> int:
        """Return the elements of a range that are padding on this rank."""
        holes = [(bucket.real_stop, bucket.plan.num_elements)]
        for slot in bucket.padded:
            first, last = slot.spec.local_range(self._plan.mesh.tp, self._tensor)
            holes.append((slot.start + (last - first) * slot.spec.shape[1], slot.stop))
        return sum(max(0, min(stop, end) - max(start, begin)) for begin, end in holes)
