"""The router of one block on one rank, and tokens that want the same experts."""

from __future__ import annotations

from typing import cast

import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.moe import MixtureOfExperts
from echelon.parallel.expert import ExpertParallel
from echelon.parallel.expert.balance import LayerLoad
from echelon.parallel.expert.router import RoutedTokens, TokenRouting
from tests.parallel.expert.targets import mixture_of, mixture_plan
from tests.parallel.targets import Built, build

EIGHT = Experts(num_experts=8, top_k=2, ffn=4)


class Toy:
    """The router of one block on one rank, and tokens that lie near one direction."""

    def __init__(self, experts: Experts, balance: Balance) -> None:
        self.plan: Plan = mixture_plan(
            experts=experts, balance=balance, sequence_length=64, microbatch_sequences=2
        )

        class Place:
            rank, device, world_size = 0, torch.device("cpu"), 1

        self.built: Built = build(cast("RankContext", Place()), self.plan)
        mixture, parallel = mixture_of(self.built)
        self.mixture: MixtureOfExperts = mixture
        self.parallel: ExpertParallel = parallel
        generator = torch.Generator().manual_seed(1)
        width = self.plan.model.hidden
        common_D = torch.randn(width, dtype=torch.float64, generator=generator)
        noise_nD = torch.randn(128, width, dtype=torch.float64, generator=generator)
        self.x_nD = (2 * common_D + noise_nD).requires_grad_()

    @property
    def tokens(self) -> RoutedTokens:
        rows = torch.arange(128)
        numbers = rows // 2 + 64 * (rows % 2)
        return RoutedTokens(key_n=rows, number_n=numbers, num_sequences=2, length=64)

    @property
    def weight_ED(self) -> torch.Tensor:
        return self.mixture.router.weight.detach()

    def step(self) -> tuple[TokenRouting, LayerLoad]:
        """Route the tokens once; the gradients of the losses are in the buckets then."""
        self.built.model.store.start_step()
        self.built.model.store.start_backward(last=True)
        self.parallel.router.balancer.start_step(1.0)
        routed = self.parallel.router.route(
            self.x_nD, self.mixture.router.weight, 0, self.tokens, train=True
        )
        routed.gates_nK.backward(torch.zeros_like(routed.gates_nK))
        return routed, self.parallel.router.balancer.finish()[0]

    def gradient(self) -> torch.Tensor:
        """Return the gradient of the router's weight."""
        (shard,) = self.built.gradients()["layers.0.mlp.router.weight"]
        return shard.tensor
