# SPDX-License-Identifier: Apache-2.0
"""LoRA: a frozen model, and beside chosen linear layers two narrow matrices that are trained.

A layer y = x W^T becomes y = x W^T + s (x A^T) B^T, with A of `rank` rows and B of `rank` columns
(Hu et al., "LoRA", 2021, section 4.1). A begins with random numbers and B with zeros, so that the
model begins as it was. s is alpha / rank, or alpha / sqrt(rank) where it is stabilised
(Kalajdzievski, "A Rank Stabilization Scaling Factor", 2023).

Names of layers are those of our own modules: q, k, v, o of attention, gate, up, down of the MLP; of
latent attention q_down, kv_down, q_up, kv_up and o.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Annotated

from echelon.core.settings.configured import Configured
from echelon.core.settings.list_types import ChoiceList
from echelon.core.settings.value_types import OPTIONAL_COUNT

ATTENTION_LINEARS = ("q", "k", "v", "o")
"""Linear layers of attention that may have an adapter."""

MLP_LINEARS = ("gate", "up", "down")
"""Those of an MLP; without a gate there is no "gate"."""

LINEARS = (*ATTENTION_LINEARS, *MLP_LINEARS)
"""Those of a block with grouped-query attention, in the order of a forward pass."""

LATENT_LINEARS = ("q_down", "kv_down", "q_up", "kv_up")
"""Those of latent attention before its heads, in the place of q, k and v."""

LORA_LINEARS = (*LATENT_LINEARS, *LINEARS)
"""All of them, in the order of a forward pass."""

ALL_LINEAR = "all-linear"
"""The word for every linear layer of a block that the model has."""

LINEAR_GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Layers that read the same input."""

LATENT_GROUPS = (("q_down", "kv_down"), ("q_up",), ("kv_up",))
"""The same of latent attention; without a vector of queries q_up reads the stream, apart."""

WHOLE_LINEARS = frozenset(LATENT_GROUPS[0])
"""Layers that every tensor rank has whole."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the two matrices of an adapter, below the name of its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Say which layers have an adapter, and how wide it is."""

    rank: Annotated[
        int,
        Configured(
            "width of adapters; none: all weights are trained", OPTIONAL_COUNT, default="none"
        ),
    ]
    """Rows of A and columns of B."""
    alpha: Annotated[float, Configured("adapters are scaled by alpha / rank", default=16.0)]
    targets: Annotated[
        tuple[str, ...],
        Configured(
            "layers with an adapter; all-linear: those of attention and of the MLP",
            ChoiceList(options=LORA_LINEARS, words=(ALL_LINEAR,)),
            default=ALL_LINEAR,
        ),
    ]
    """Names of `LORA_LINEARS`, in that order."""
    rslora: Annotated[bool, Configured("scaled by alpha / sqrt(rank)")] = False

    @property
    def scale(self) -> float:
        """Return s."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, linears: tuple[str, ...]) -> bool:
        """Return whether any of these layers has an adapter."""
        return any(name in self.targets for name in linears)
