"""The modules that blocks share: weights, norms, the dense MLP; an `Operations` computes.

Shape suffixes: see `models/operations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from echelon.core.model_shape import ModelShape
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
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


class Norm(Weight):
    """Normalise over the last dim: RMSNorm, or LayerNorm where the shape says so."""

    def __init__(self, shape: ModelShape, operations: Operations) -> None:
        """Make the norm of the residual width."""
        super().__init__(shape.hidden, bias=shape.norm == "layernorm")
        self.operations = operations
        self.eps = shape.norm_eps

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return x normalised."""
        return self.operations.norm(x_ND, self.weight, self.bias, self.eps)


class MLP(nn.Module):
    """The feed-forward part: SwiGLU where the shape is gated, else one activation."""

    def __init__(self, shape: ModelShape, operations: Operations, ffn: int) -> None:
        """Make the projections for `ffn` inner columns: all, or those of one tensor rank."""
        super().__init__()
        self.shape, self.operations = shape, operations
        if shape.gated:
            self.gate = linear(shape.hidden, ffn, shape.mlp_bias)
        self.up = linear(shape.hidden, ffn, shape.mlp_bias)
        self.down = linear(ffn, shape.hidden, shape.mlp_bias)

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch | None = None) -> torch.Tensor:
        """Return the output of the MLP, [N, D]; which tokens these are does not matter."""
        ops = self.operations
        if self.shape.gated:
            inner_NF = ops.gate(ops.project_in(x_ND, (self.gate, self.up)))
        else:
            inner_NF = ops.activate(ops.project_in(x_ND, (self.up,)), self.shape.activation)
        return ops.project_out(inner_NF, self.down)


def linear(inner: int, out: int, bias: bool) -> nn.Linear:
    """Return a linear layer whose values are set later (see `models/initial.py`)."""
    # `skip_init` would make real memory on the meta device too, were it not told.
    device = torch.get_default_device()
    return cast(nn.Linear, nn.utils.skip_init(nn.Linear, inner, out, bias=bias, device=device))
