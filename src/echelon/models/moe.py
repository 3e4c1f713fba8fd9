# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts part of a block: a router, its experts, and those that every token meets.

Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; Jiang et al., "Mixtral of
Experts", 2024; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2 (sigmoid scores,
groups, shared experts); OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025 (biases, clamped
SwiGLU). Like all modules it holds weights; `Operations.mixture` computes.

Shape suffixes: R rows of an expert, N tokens, D hidden, F inner width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.model_shape import Experts, ModelShape
from echelon.models.batch import TokenBatch
from echelon.models.modules import EmptyLinear, TensorShare, Weight
from echelon.models.precision import at_least_fp32


class Expert(nn.Module):
    """Hold the three matrices of one routed expert, or one of `expert_tp` pieces of them.

    Each piece has the whole bias of the output, which is to be added once.
    """

    def __init__(self, hidden: int, experts: Experts, pieces: int = 1) -> None:
        """Make the projections for the inner columns of one of `pieces` pieces."""
        super().__init__()
        self.kind, self.pieces, ffn = experts, pieces, experts.ffn // pieces
        self.gate = EmptyLinear(hidden, ffn, experts.bias)
        self.up = EmptyLinear(hidden, ffn, experts.bias)
        self.down = EmptyLinear(ffn, hidden, experts.bias)

    def inner(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return what the last matrix reads, not yet weighted, [R, F]."""
        gate_RF, up_RF = self.gate(x_RD), self.up(x_RD)
        limit = self.kind.limit
        if limit is None:
            return fn.silu(gate_RF) * up_RF
        gate_RF, up_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit)
        return (up_RF + 1) * gate_RF * torch.sigmoid(self.kind.alpha * gate_RF)

    def weighted(
        self, x_RD: torch.Tensor, gates_R: torch.Tensor, *, biased: bool = True
    ) -> torch.Tensor:
        """Return the output for some rows times the weight of each, [R, D].

        Without the bias of the output where it is not to be added here (`biased`).
        """
        inner_RF = (self.inner(x_RD) * gates_R[:, None]).to(x_RD.dtype)
        if not self.kind.bias:
            return self.down(inner_RF)
        y_RD = fn.linear(inner_RF, self.down.weight)
        return y_RD + self.weighted_bias(gates_R, x_RD.dtype) if biased else y_RD

    def weighted_bias(self, gates_R: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the bias of the output times the weight of each row, [R, D]."""
        return (gates_R[:, None] * self.down.bias).to(dtype)


def router_logits(mixture: MixtureOfExperts, x_ND: torch.Tensor) -> torch.Tensor:
    """Return the logits of a router, [N, E], in at least float32."""
    wide = at_least_fp32(x_ND.dtype)
    bias = mixture.logit_bias.weight.to(wide) if mixture.routing.logit_bias else None
    return fn.linear(x_ND.to(wide), mixture.router.weight.to(wide), bias)


class MixtureOfExperts(nn.Module):
    """Hold a router and the experts of one block that are on this rank."""

    def __init__(
        self,
        shape: ModelShape,
        mix: Callable[[torch.Tensor, MixtureOfExperts, TokenBatch], torch.Tensor],
        layer: int,
        share: TensorShare,
        shared: nn.Module | None,
    ) -> None:
        """Make the router and this rank's share of the routed experts; take the `shared` ones.

        `mix` is what an `Operations` makes of tokens with them.
        """
        super().__init__()
        experts = shape.experts
        assert experts is not None, "a block without experts has a dense MLP"
        self.shape, self.routing, self.layer, self.mix = shape, experts, layer, mix
        self.router = Weight(experts.num_experts, shape.hidden)
        if experts.logit_bias:
            self.logit_bias = Weight(experts.num_experts)
        held = range(experts.num_experts) if share.experts is None else share.experts
        pieces = share.expert_tp
        self.experts = nn.ModuleDict({str(e): Expert(shape.hidden, experts, pieces) for e in held})
        if shared is not None:
            self.shared = shared

    def held(self) -> list[Expert]:
        """Return the experts that are here, in the order of their numbers."""
        return [self.experts[name] for name in self.experts]  # type: ignore[misc]

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return what its experts make of each token, [N, D]."""
        return self.mix(x_ND, self, batch)
