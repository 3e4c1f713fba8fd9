"""Situations of real presets for the tests of guides."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.handbook.guides.situation import PlanSituation

MEMORY = {"a100-40gb": 40, "a100-80gb": 80, "h100": 80, "h200": 141, "gb200": 186, "cpu": 2}
"""GB of a device, round, so that what fits does not hang on a few percent of a preset."""


@lru_cache(maxsize=64)
def plan_of(text: str) -> Plan:
    """Return the plan of "MODEL CLUSTER [key=value ...]", in bf16 unless it says otherwise."""
    model, cluster, *settings = text.split()
    if not any(setting.startswith("precision.parameters=") for setting in settings):
        settings.append("precision.parameters=bf16")
    plan = load_job(model, (f"cluster.preset={cluster}", *settings)).plan
    memory = int(MEMORY[cluster.partition("x")[2]] * 1e9)
    device = replace(plan.cluster.device, memory_bytes=memory)
    return replace(plan, cluster=replace(plan.cluster, device=device))


def situation(text: str) -> PlanSituation:
    """Return the situation of the same words."""
    return PlanSituation.of(plan_of(text))
