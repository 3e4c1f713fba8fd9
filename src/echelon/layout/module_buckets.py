# SPDX-License-Identifier: Apache-2.0
"""The buckets of any module: names, sizes and padding.

A *unit* is a part of the module that is gathered at a time at stage 3. What no unit owns is the
root's: it stays whole from the forward pass to the end of backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from echelon.core.axis import LOSS_AXES
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.layout.buckets import FIRST_BUCKET_BYTES, BucketPlan, padded_elements
from echelon.layout.stage import update_rule_of

ROOT = "(root)"
"""The unit of everything that no other unit owns; a name that no module has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleParameter:
    """Say of one parameter which units use it, and whether it is trained.

    Its shape is that of what a tensor rank holds; `cut` says that others hold other parts, `summed`
    that its gradient is added up over them.
    """

    spec: ParameterSpec
    users: tuple[str, ...]
    trained: bool
    cut: bool = False
    summed: bool = False


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
        runs = [
            run
            for summed in (False, True)
            for run in _filled(plan, [one for one in trained if one.summed is summed])
        ]
        return ModuleBuckets(trained=_named(plan, "bucket", runs, units), frozen=())
    keep = plan.layout.zero.keep_whole_below
    small = [one for one in trained if one.spec.numel < keep]
    large = [one for one in trained if one.spec.numel >= keep]
    whole = [run for summed in (False, True) if (run := [p for p in small if p.summed is summed])]
    runs = [*_by_unit(plan, large, units), *whole]
    rest = _by_unit(plan, [one for one in frozen if one.spec.numel >= keep], units)
    return ModuleBuckets(
        trained=_named(plan, "bucket", runs, units, whole=whole),
        frozen=_named(plan, "frozen", rest, units),
    )


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
        key = (*key, rooted) if one.users == (ROOT,) else key
        runs.setdefault((one.summed, *key), []).append(one)
    return list(runs.values())[::-1]


def _named(
    plan: Plan,
    prefix: str,
    runs: Iterable[Sequence[ModuleParameter]],
    units: Sequence[str],
    *,
    whole: Sequence[Sequence[ModuleParameter]] = (),
) -> tuple[BucketPlan, ...]:
    data = plan.mesh.degree(*LOSS_AXES)
    return tuple(
        BucketPlan(
            name=f"{prefix}{index}",
            kind="partial" if run[0].summed else "whole",
            names=tuple(one.spec.name for one in run),
            num_elements=padded_elements(sum(one.spec.numel for one in run), data),
            update=update_rule_of(plan.mathematics.optimizer, run[0].spec),
            units=tuple(unit for unit in units if any(unit in one.users for one in run)),
            sliced=plan.layout.zero.stage == 3 and not any(run is one for one in whole),
        )
        for index, run in enumerate(runs)
    )
