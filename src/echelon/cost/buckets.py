"""How the parameters of a rank are cut into flat buckets: names and sizes, no tensors.

The engine builds its buckets from this and the byte formulas add it up, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from echelon.core.axis import LOSS_AXES
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.stage import (
    StagePart,
    partial_over_tensor,
    shared_by_ends,
    stage_parameters,
)

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the link has work as soon as backward begins."""

BucketKind = Literal["whole", "partial", "tied"]
"""whole: summed over data ranks; partial: over tensor ranks first; tied: over both ends first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Name the parameters of one bucket; `num_elements` includes the padding at its end."""

    name: str
    kind: BucketKind
    names: tuple[str, ...]
    num_elements: int


def plan_buckets(plan: Plan, part: StagePart) -> tuple[BucketPlan, ...]:
    """Return the buckets of a stage, in the order in which backward completes them."""
    specs = stage_parameters(plan, part)
    size = DTYPE_BYTES[plan.mathematics.precision.gradients]
    limit = plan.layout.zero.bucket_bytes // size
    tp = plan.mesh.tp
    partial: list[ParameterSpec] = []
    tied: list[ParameterSpec] = []
    runs: list[list[ParameterSpec]] = [[]]
    for unit in _units_backward(specs):
        for spec in unit:
            if shared_by_ends(plan, part, spec):
                tied.append(spec)
            elif partial_over_tensor(plan, spec):
                partial.append(spec)
            else:
                runs[-1].append(spec)
        full = limit if len(runs) > 1 else min(limit, FIRST_BUCKET_BYTES // size)
        if sum(spec.local_numel(tp) for spec in runs[-1]) >= full:
            runs.append([])
    whole: list[tuple[BucketKind, list[ParameterSpec]]] = [("whole", run) for run in runs]
    rest: list[tuple[BucketKind, list[ParameterSpec]]] = [("partial", partial), ("tied", tied)]
    return tuple(
        _bucket(f"bucket{index}", kind, run, tp, plan.mesh.degree(*LOSS_AXES))
        for index, (kind, run) in enumerate(pair for pair in (*whole, *rest) if pair[1])
    )


def segment_order(names: Iterable[str], specs: Mapping[str, ParameterSpec]) -> list[str]:
    """Return names with those that take weight decay first; otherwise the order is kept."""
    return sorted(names, key=lambda name: not specs[name].decays)


def _bucket(
    name: str, kind: BucketKind, run: Sequence[ParameterSpec], tp: int, data: int
) -> BucketPlan:
    size = sum(spec.local_numel(tp) for spec in run)
    return BucketPlan(
        name=name,
        kind=kind,
        names=tuple(spec.name for spec in run),
        num_elements=-(-size // data) * data,
    )


def _units_backward(specs: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Group parameters by block and return the groups last first, each in forward order."""
    units: list[list[ParameterSpec]] = []
    for spec in specs:
        if units and units[-1][-1].layer == spec.layer:
            units[-1].append(spec)
        else:
            units.append([spec])
    return units[::-1]
