"""Settings of adapters -> Lora: which layers have one, by the names that the model has."""

from __future__ import annotations

from typing import cast

from echelon.config.view import View
from echelon.core.choices.lora import ALL_LINEAR, LINEARS, Lora

RANK_KEY, ALPHA_KEY, TARGETS_KEY = "lora.rank", "lora.alpha", "lora.targets"
RSLORA_KEY, DROPOUT_KEY = "lora.rslora", "lora.dropout"


def has_lora(view: View) -> bool:
    """Return whether adapters are trained, and nothing else."""
    return view.value(RANK_KEY) != "none"


def read_lora(view: View) -> Lora | None:
    """Return the adapters of a model; None where all of its weights are trained."""
    if not has_lora(view):
        return None
    return Lora(
        rank=view.integer(RANK_KEY),
        alpha=view.number(ALPHA_KEY),
        targets=lora_targets(view),
        rslora=view.flag(RSLORA_KEY),
    )


def lora_targets(view: View) -> tuple[str, ...]:
    """Return the layers with an adapter, in forward order; "all-linear" are those that there are.

    An MLP without a gate has no "gate".
    """
    asked = view.value(TARGETS_KEY)
    if asked == ALL_LINEAR:
        gated = view.flag("model.gated")
        return tuple(name for name in LINEARS if gated or name != "gate")
    words = cast("list[str]", asked)
    return tuple(name for name in LINEARS if name in words)
