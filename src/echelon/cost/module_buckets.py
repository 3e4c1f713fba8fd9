"""The buckets of any module: names, sizes and padding; and the bytes that its steps send.

A *unit* is a part of the module that is gathered at a time at stage 3. What no unit owns is the
root's: it stays whole from the forward pass to the end of backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.buckets import (
    FIRST_BUCKET_BYTES,
    BucketPlan,
    accumulates_slices,
    shard_degree,
    slice_elements,
)
from echelon.cost.collectives import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from echelon.cost.data_bytes import DATA_AXIS
from echelon.cost.updates import update_of

ROOT = "(root)"
"""The unit of everything that no other unit owns; a name that no module has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleParameter:
    """Say of one parameter which units use it, and whether it is trained."""

    spec: ParameterSpec
    users: tuple[str, ...]
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBuckets:
    """Hold the buckets of what is trained, in the order of their reduction, and of what is frozen.

    Frozen parameters are in buckets at stage 3 only, where they are cut like the others.
    """

    trained: tuple[BucketPlan, ...]
    frozen: tuple[BucketPlan, ...]

    @property
    def sliced(self) -> tuple[BucketPlan, ...]:
        """Return the buckets whose parameters rest as slices."""
        return tuple(bucket for bucket in (*self.trained, *self.frozen) if bucket.sliced)


def plan_module_buckets(
    plan: Plan, parameters: Sequence[ModuleParameter], units: Sequence[str]
) -> ModuleBuckets:
    """Return the buckets of `parameters`, which stand in the order in which they were registered.

    `units` are all units in that order, the root too. At stage 3, `unit_blocks` consecutive units
    share a bucket; below, buckets are filled from the last parameter to the first.
    """
    trained = [one for one in parameters if one.trained]
    frozen = [one for one in parameters if not one.trained]
    if plan.layout.zero.stage < 3:
        return ModuleBuckets(
            trained=_named(plan, "bucket", _filled(plan, trained), units), frozen=()
        )
    keep = plan.layout.zero.keep_whole_below
    small = [one for one in trained if one.spec.numel < keep]
    large = [one for one in trained if one.spec.numel >= keep]
    runs = [*_by_unit(plan, large, units), *([small] if small else [])]
    rest = _by_unit(plan, [one for one in frozen if one.spec.numel >= keep], units)
    return ModuleBuckets(
        trained=_named(plan, "bucket", runs, units, whole=small),
        frozen=_named(plan, "frozen", rest, units),
    )


def module_bytes(
    plan: Plan, buckets: ModuleBuckets, *, passes: int, kept: Collection[str]
) -> dict[str, int]:
    """Return the bytes that a rank sends for data parallelism in a step of `passes` backwards.

    A sliced bucket in `kept` is whole from forward to the end of backward, so it is gathered once
    for both; without resharding each is gathered once per step.
    """
    zero, precision = plan.layout.zero, plan.mathematics.precision
    size, wide = DTYPE_BYTES[precision.parameters], DTYPE_BYTES[precision.reduction]
    if zero.stage == 0:
        degree = plan.mesh.degree(*LOSS_AXES)
        sums = [all_reduce_bytes(one.num_elements * wide, degree) for one in buckets.trained]
        return _nonzero({DATA_AXIS: sum(sums)})
    degree, replicas = shard_degree(plan), plan.mesh.dp_replicate
    sent = {Axis.DP_SHARD.value: 0, Axis.DP_REPLICATE.value: 0}
    for bucket in buckets.trained:
        piece = slice_elements(plan, bucket)
        rounds = passes if accumulates_slices(plan) else 1
        sent[Axis.DP_SHARD.value] += rounds * reduce_scatter_bytes(piece * wide, degree)
        sent[Axis.DP_REPLICATE.value] += all_reduce_bytes(piece * wide, replicas)
        if not bucket.sliced:
            sent[Axis.DP_SHARD.value] += all_gather_bytes(piece * size, degree)
    for bucket in buckets.sliced:
        rounds = passes * (1 if bucket.name in kept else 2) if zero.reshard_after_forward else 1
        piece = slice_elements(plan, bucket)
        sent[Axis.DP_SHARD.value] += rounds * all_gather_bytes(piece * size, degree)
    return _nonzero(sent)


def _nonzero(sent: Mapping[str, int]) -> dict[str, int]:
    return {axis: count for axis, count in sent.items() if count}


def _filled(plan: Plan, parameters: Sequence[ModuleParameter]) -> Iterator[list[ModuleParameter]]:
    size = DTYPE_BYTES[plan.mathematics.precision.gradients]
    limit = plan.layout.zero.bucket_bytes // size
    wanted, run = min(limit, FIRST_BUCKET_BYTES // size), list[ModuleParameter]()
    for parameter in reversed(parameters):
        run.insert(0, parameter)
        if sum(one.spec.numel for one in run) >= wanted:
            yield run
            wanted, run = limit, []
    if run:
        yield run


def _by_unit(
    plan: Plan, parameters: Sequence[ModuleParameter], units: Sequence[str]
) -> list[list[ModuleParameter]]:
    """Return what is gathered together, in reverse: what has the same users, or users as near.

    The root's parameters before a unit and those after it are not: backward needs them apart.
    """
    together = plan.layout.zero.unit_blocks
    others = [unit for unit in units if unit != ROOT]
    group = {unit: index // together for index, unit in enumerate(others)}
    runs: dict[tuple[object, ...], list[ModuleParameter]] = {}
    rooted, before = 0, ()
    for one in parameters:
        if one.users == (ROOT,) and before != one.users:
            rooted += 1
        before = one.users
        key: tuple[object, ...] = tuple(sorted({group.get(user, -1) for user in one.users}))
        runs.setdefault((*key, rooted) if one.users == (ROOT,) else key, []).append(one)
    return list(runs.values())[::-1]


def _named(
    plan: Plan,
    prefix: str,
    runs: Iterable[Sequence[ModuleParameter]],
    units: Sequence[str],
    *,
    whole: Sequence[ModuleParameter] = (),
) -> tuple[BucketPlan, ...]:
    return tuple(
        BucketPlan(
            name=f"{prefix}{index}",
            kind="whole",
            names=tuple(one.spec.name for one in run),
            num_elements=_padded(plan, sum(one.spec.numel for one in run)),
            update=update_of(plan.mathematics.optimizer, run[0].spec),
            units=tuple(unit for unit in units if any(unit in one.users for one in run)),
            sliced=plan.layout.zero.stage == 3 and run is not whole,
        )
        for index, run in enumerate(runs)
    )


def _padded(plan: Plan, num_elements: int) -> int:
    """Return the elements of a bucket that all data ranks can share out evenly."""
    data = plan.mesh.degree(*LOSS_AXES)
    return -(-num_elements // data) * data
