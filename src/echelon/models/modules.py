"""What modules hold of a model: a share of its matrices, weights, linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


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
    """A linear layer whose values are set later (see `models/initial.py`)."""

    def reset_parameters(self) -> None:
        """Leave the values as they are: drawing them takes longer than a small model's step."""
