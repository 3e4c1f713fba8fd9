"""The plans in which bugs of context parallelism are planted, and what is told of them."""

from __future__ import annotations

from typing import Any

from tests.proof.mutants.planting import LAST, Told

ATTENTION = "layers.0.attention"
Q = f"{ATTENTION}.q.weight"
V = f"{LAST}.attention.v.weight"
HEAD = "head.weight"
DOCUMENTS: dict[str, Any] = {"documents": "separate"}
MQA = {"heads": 4, "kv_heads": 1}


def split(kind: str, cp: int = 2, ulysses: int = 1, **more: Any) -> dict[str, Any]:
    """Return a plan whose sequences are split over `cp` ranks."""
    axes = {"cp": cp, **more.pop("mesh", {})}
    degree = cp if kind == "ulysses" else ulysses
    context = {"kind": kind, "ulysses_degree": degree}
    return {"mesh": axes, "context": context, "accumulation": 2, **more}


def in_forward(
    plan: dict[str, Any], factor: str, tensor: str = ATTENTION, rule: str = "prove-activations"
) -> Told:
    """Return what is told of a bug of the forward pass."""
    return Told(rule, tensor, factor, "cp", plan=plan)


def in_gradients(plan: dict[str, Any], factor: str, tensor: str = V, axis: str = "cp") -> Told:
    """Return what is told of a bug in the gradients."""
    return Told("prove-gradients", tensor, factor, axis, plan=plan)
