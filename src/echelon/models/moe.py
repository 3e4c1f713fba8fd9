"""The mixture-of-experts part of a block: a router, its experts, and those that every token meets.

Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; Jiang et al., "Mixtral of
Experts", 2024; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2 (sigmoid scores,
groups, shared experts). Like all modules it holds weights; `Operations.mixture` computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from echelon.core.model_shape import ModelShape
from echelon.models.batch import TokenBatch
from echelon.models.modules import EmptyLinear, TensorShare, Weight


class Expert(nn.Module):
    """Hold the three matrices of one routed expert, or one of `expert_tp` pieces of them."""

    def __init__(self, hidden: int, ffn: int) -> None:
        """Make the projections for `ffn` inner columns."""
        super().__init__()
        self.gate = EmptyLinear(hidden, ffn, False)
        self.up = EmptyLinear(hidden, ffn, False)
        self.down = EmptyLinear(ffn, hidden, False)


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
        held = range(experts.num_experts) if share.experts is None else share.experts
        ffn = experts.ffn // share.expert_tp
        self.experts = nn.ModuleDict({str(e): Expert(shape.hidden, ffn) for e in held})
        if shared is not None:
            self.shared = shared

    def held(self) -> list[Expert]:
        """Return the experts that are here, in the order of their numbers."""
        return [self.experts[name] for name in self.experts]  # type: ignore[misc]

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return what its experts make of each token, [N, D]."""
        return self.mix(x_ND, self, batch)
