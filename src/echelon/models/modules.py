# SPDX-License-Identifier: Apache-2.0
"""What modules hold of a model: a share of its matrices, weights, linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.choices.lora import Lora
from echelon.core.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShare:
    """Say which part of a model's matrices a rank holds: one of `tp` pieces of each.

    Of routed experts it is those of `experts` (None: all), in `expert_tp` pieces.
    """

    tp: int = 1
    expert_tp: int = 1
    experts: range | None = None


class Weight(nn.Module):
    """Hold a weight (and a bias) under a canonical name; the operations say what they do."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        """Make an uninitialised weight of `shape`, and a bias of its first dim where asked."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None


class EmptyLinear(nn.Linear):
    """A linear layer whose values are set later (`counter_random.py`), maybe with an adapter.

    Of a layer that tensor ranks split by output each has its rows of B and all of A, of one that
    is split by input its columns of A and all of B (`core/choices/lora.py`).
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool = False, *, lora: Lora | None = None
    ) -> None:
        """Make the layer, or a rank's share of one; `lora` where it has an adapter."""
        super().__init__(inputs, outputs, bias)
        self.lora = lora
        if lora is not None:
            self.lora_a, self.lora_b = Weight(lora.rank, inputs), Weight(outputs, lora.rank)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x W^T, with s (x A^T) B^T where there is an adapter."""
        y = super().forward(input)
        if self.lora is None:
            return y
        narrow = fn.linear(input, self.lora_a.weight)
        return y + fn.linear(narrow, self.lora_b.weight) * self.lora.scale

    def reset_parameters(self) -> None:
        """Leave the values as they are: drawing them takes longer than a small model's step."""


def block_linear(
    shape: ModelShape, name: str, inputs: int, outputs: int, bias: bool
) -> EmptyLinear:
    """Return a linear layer of a block, with an adapter where the shape says so."""
    adapted = shape.lora is not None and name in shape.lora.targets
    return EmptyLinear(inputs, outputs, bias, lora=shape.lora if adapted else None)
