"""Situations of real presets for the tests of guides."""

from __future__ import annotations

from functools import lru_cache

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.planner.guides.situation import Situation


@lru_cache(maxsize=64)
def plan_of(text: str) -> Plan:
    """Return the plan of "MODEL CLUSTER [key=value ...]", in bf16 unless it says otherwise."""
    model, cluster, *settings = text.split()
    if not any(setting.startswith("precision.parameters=") for setting in settings):
        settings.append("precision.parameters=bf16")
    return load_job(model, (f"cluster.preset={cluster}", *settings)).plan


def situation(text: str) -> Situation:
    """Return the situation of the same words."""
    return Situation(plan_of(text))
