# SPDX-License-Identifier: Apache-2.0
"""Settings of adapters -> Lora: which layers have one, by the names that the model has."""

from __future__ import annotations

from typing import cast

from echelon.config.view import View
from echelon.core.choices.lora import (
    ALL_LINEAR,
    ATTENTION_LINEARS,
    LATENT_LINEARS,
    LORA_LINEARS,
    MLP_LINEARS,
    Lora,
)

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
    """Return the layers with an adapter, in forward order; "all-linear" are all there are."""
    asked = view.value(TARGETS_KEY)
    if asked == ALL_LINEAR:
        return lora_linears(view)
    words = cast("list[str]", asked)
    return tuple(name for name in LORA_LINEARS if name in words)


def lora_linears(view: View) -> tuple[str, ...]:
    """Return the linear layers of the model that may have an adapter, in forward order.

    An MLP without a gate has no "gate", latent attention without a vector of queries no "q_down".
    """
    gated = view.flag("model.gated")
    mlp = tuple(name for name in MLP_LINEARS if gated or name != "gate")
    if not view.has_table("model.latent"):
        return (*ATTENTION_LINEARS, *mlp)
    compressed = view.value("model.latent.query_rank") != "none"
    latent = tuple(name for name in LATENT_LINEARS if compressed or name != "q_down")
    return (*latent, "o", *mlp)
