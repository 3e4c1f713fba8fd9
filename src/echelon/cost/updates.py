"""Which rule updates a parameter, whether it decays, and which state the rule keeps for it."""

from __future__ import annotations

from typing import Literal

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer

Update = Literal["adamw", "sgd", "muon"]

STATE_KINDS: dict[Update, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum",),
    "muon": ("momentum",),
}
"""The tensors, each as large as the parameter, that a rule keeps from step to step."""


def update_of(optimizer: Optimizer, spec: ParameterSpec) -> Update:
    """Return the rule that updates a parameter.

    Muon is for the matrices of blocks; embedding, head, norms and biases are AdamW's (Jordan et
    al., "Muon", 2024).
    """
    if optimizer.kind != "muon":
        return optimizer.kind
    return "muon" if spec.layer is not None and len(spec.shape) == 2 else "adamw"


def decays(optimizer: Optimizer, spec: ParameterSpec) -> bool:
    """Return whether a parameter takes weight decay, by `optimizer.decay`."""
    if optimizer.decay == "all":
        return True
    matrix = len(spec.shape) > 1
    return matrix and (optimizer.decay == "matrices" or spec.layer is not None)
