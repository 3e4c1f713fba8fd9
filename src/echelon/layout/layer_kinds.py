# SPDX-License-Identifier: Apache-2.0
"""Plans of one kind of attention: what blocks of that kind send, hold and take is said of them."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import of_layer_kind
from echelon.core.plan import Plan


def plan_of_layer(plan: Plan, layer: int) -> Plan:
    """Return the plan of a model in which all blocks have the window of `layer`, or none."""
    model = of_layer_kind(plan.model, plan.model.layer_kind(layer))
    if model is plan.model:
        return plan
    return replace(plan, mathematics=replace(plan.mathematics, model=model))
