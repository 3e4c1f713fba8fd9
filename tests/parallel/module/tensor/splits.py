"""How ranks hold a module by rules."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.parallel.module.tensor.rules import find_targets, read_rules
from echelon.parallel.module.tensor.split import SplitPlan, plan_split


def split(model: nn.Module, rules: dict[str, Any], degree: int = 2, **more: Any) -> SplitPlan:
    """Return how ranks hold a module by rules."""
    return plan_split(model, find_targets(model, read_rules(rules)), degree=degree, **more)
