"""Small plans of every ZeRO stage for the tests of formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.core.plan import Plan, Precision, Zero, ZeroStage
from tests.parallel.layouts import plan_of


def zero_plan(
    stage: ZeroStage,
    *,
    zero: Zero | None = None,
    precision: Precision | None = None,
    cp: int = 1,
    **changes: Any,
) -> Plan:
    """Return a small plan at a ZeRO stage: slices add up from stage 2 on, unless `zero` says."""
    plan = plan_of(**changes)
    default = Zero(
        stage=stage,
        bucket_bytes=plan.layout.zero.bucket_bytes,
        accumulate="slices" if stage >= 2 else "whole",
    )
    layout = replace(plan.layout, zero=zero or default, mesh=replace(plan.mesh, cp=cp))
    mathematics = plan.mathematics
    if precision is not None:
        mathematics = replace(mathematics, precision=precision)
    return replace(plan, layout=layout, mathematics=mathematics)
