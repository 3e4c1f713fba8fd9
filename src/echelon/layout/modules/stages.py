# SPDX-License-Identifier: Apache-2.0
"""The buckets of one pipeline rank of any module: those of each of its stages, the last one first.

No bucket is of two stages, but that of a parameter which the first and the last stage of a rank
share. What two ranks share (a tied embedding) has buckets of its own, summed over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.core.plan import Plan
from echelon.layout.buckets import BucketPlan
from echelon.layout.module_buckets import ModuleBuckets, ModuleParameter, plan_module_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedParameter:
    """Say of a parameter which stages of the whole module use it."""

    parameter: ModuleParameter
    stages: tuple[int, ...]


def plan_stage_buckets(
    plan: Plan, parameters: Sequence[StagedParameter], units: Sequence[str], here: Sequence[int]
) -> ModuleBuckets:
    """Return the buckets of a rank that has the stages `here`, in the order of their reduction.

    `parameters` are those of the whole module in the order of registration, `units` its blocks and
    its root. Tied parameters come after all others of their stage.
    """
    groups: dict[tuple[tuple[int, ...], bool], list[ModuleParameter]] = {}
    for one in parameters:
        mine = tuple(stage for stage in one.stages if stage in here)
        if mine:
            tied = len(mine) < len(one.stages)
            groups.setdefault((mine, tied), []).append(one.parameter)
    trained: list[BucketPlan] = []
    frozen: list[BucketPlan] = []
    for (stages, tied), held in sorted(groups.items(), key=_order):
        found = plan_module_buckets(plan, held, units)
        for kept, buckets in ((trained, found.trained), (frozen, found.frozen)):
            prefix = "bucket" if kept is trained else "frozen"
            kept += [
                replace(
                    bucket,
                    name=f"{prefix}{len(kept) + index}",
                    kind="tied" if tied and kept is trained else bucket.kind,
                    stages=stages,
                )
                for index, bucket in enumerate(buckets)
            ]
    return ModuleBuckets(trained=tuple(trained), frozen=tuple(frozen))


def _order(
    group: tuple[tuple[tuple[int, ...], bool], list[ModuleParameter]],
) -> tuple[int, int, int]:
    """Sort the last stage first; what two of its stages share, or two ranks, comes at the end."""
    (stages, tied), _ = group
    return (len(stages), -stages[0], int(tied))
