"""The plans in which bugs of experts are planted, and what is told of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.mutants.planting import Told

FIRST, LAST = "layers.0.mlp", "layers.1.mlp"
ROUTER = f"{LAST}.router.weight"
EXPERT = f"{LAST}.experts.5.down.weight"
AUX = Balance(kind="aux", aux_coefficient=0.1)
BY_SEQUENCE = replace(AUX, aux_over="sequence")
Z_LOSS = Balance(z_coefficient=0.01)
BIAS = Balance(kind="bias", bias_rate=0.05)
ONE_OF_EIGHT = replace(MIXTRAL, experts=Experts(num_experts=8, top_k=1, ffn=12))
EP2: dict[str, Any] = {"dp_shard": 2, "ep": 2}
WHOLE: dict[str, Any] = {"tp": 2, "ep": 2}
PIECES: dict[str, Any] = {
    "tp": 2,
    "dp_shard": 2,
    "ep": 2,
    "experts": ExpertLayout(expert_tp=2),
}


def in_routes(factor: str, axis: str, **plan: Any) -> Told:
    """Return what is told of a bug that sends tokens elsewhere in the layers above it."""
    tensor, step = plan.pop("tensor", FIRST), plan.pop("step", 0)
    rule = plan.pop("rule", "prove-routes")
    return Told(rule, tensor, factor, axis, step, {"model": MIXTRAL, **plan}, of=plan_of)


def in_expert_gradients(tensor: str, factor: str, axis: str, **plan: Any) -> Told:
    """Return what is told of a bug in gradients alone."""
    step, rule = plan.pop("step", 0), plan.pop("rule", "prove-gradients")
    return Told(rule, tensor, factor, axis, step, {"model": MIXTRAL, **plan}, of=plan_of)
