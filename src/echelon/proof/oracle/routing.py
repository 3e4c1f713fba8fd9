# SPDX-License-Identifier: Apache-2.0
"""How one device routes tokens to experts: losses, loads, and what follows for the next step.

Written apart from the engine, from the formulas: Switch Transformer (2021), section 2.2, for the
auxiliary loss; DeepSeek-V3 (2024), section 2.1.2, for that of each sequence and for biases; ST-MoE
(2022), section 2.2, for the z-loss. `core.experts.Balance` says what is meant by which word.

Shape suffixes: B sequences of the global batch, T positions, N = T * B, E experts, K experts of a
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.models.moe import ReferenceRouting, RoutingNotes, probabilities
from echelon.models.precision import at_least_fp32
from echelon.proof.oracle.operations import ForcedRouting, ForcedRoutingNotes

TOKEN_DROPPED = -1
"""In place of the number of an expert: it had no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingState:
    """Hold what a step takes from the steps before, by layer: biases, and shares of the loads."""

    biases: Mapping[int, torch.Tensor]
    shares: Mapping[int, torch.Tensor]

    @classmethod
    def start(cls, plan: Plan, dtype: torch.dtype) -> RoutingState:
        """Return the state before the first step: no bias, the same share for each expert."""
        experts = plan.model.experts
        if experts is None:
            return cls(biases={}, shares={})
        layers = [i for i in range(plan.model.layers) if plan.model.layer_has_experts(i)]
        size, wide = experts.num_experts, at_least_fp32(dtype)
        biases = {i: torch.zeros(size, dtype=wide) for i in layers if experts.router_bias}
        shares = {i: torch.full((size,), 1 / size, dtype=wide) for i in layers}
        return cls(biases=biases, shares=shares)

    def routing_notes(self, plan: Plan, forced: ForcedRouting | None = None) -> RoutingNotes:
        """Return what the reference routes by."""
        balance = plan.mathematics.balance
        if forced is None:
            return RoutingNotes(balance=balance, biases=self.biases)
        return ForcedRoutingNotes(balance=balance, biases=self.biases, forced=forced)

    def after(self, plan: Plan, layers: Mapping[int, RoutedLayer]) -> RoutingState:
        """Return the state after a step that routed so."""
        balance = plan.mathematics.balance
        biases, shares = dict(self.biases), dict(self.shares)
        for layer, routed in layers.items():
            counts_E = routed.counts_E.double()
            shares[layer] = (counts_E / counts_E.sum()).to(shares[layer].dtype)
            if balance.has_bias:
                away_E = torch.sign(counts_E.mean() - counts_E).to(biases[layer].dtype)
                biases[layer] = biases[layer] + balance.bias_rate * away_E
        return RoutingState(biases=biases, shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayer:
    """Say how one layer routed a global batch: B sequences of T tokens, K of E experts each."""

    picked_BTK: torch.Tensor
    """The experts with the largest of `wanted_BTE`."""
    right_BTK: torch.Tensor
    """What one device that was told where tokens go would have picked."""
    kept_BTK: torch.Tensor
    """Which of `picked_BTK` had room."""
    wanted_BTE: torch.Tensor
    """Scores and bias."""
    gates_BTK: torch.Tensor
    """Weights of the outputs of the picked experts."""
    counts_E: torch.Tensor
    """Tokens that picked each expert, before any drops."""
    dropped: int
    """Assignments for which there was no room."""
    aux_loss: float
    """The loss for the load."""
    z_loss: float
    """The z-loss."""

    @property
    def chosen_BTK(self) -> torch.Tensor:
        """Return the experts of each token; `TOKEN_DROPPED` in place of one without room."""
        return self.picked_BTK.masked_fill(~self.kept_BTK, TOKEN_DROPPED)

    @property
    def imbalance(self) -> float:
        """Return the load of the busiest expert over the mean."""
        return float(self.counts_E.max() / self.counts_E.double().mean())


def routing_losses(
    plan: Plan, notes: RoutingNotes, state: RoutingState
) -> tuple[torch.Tensor | None, Mapping[int, RoutedLayer]]:
    """Return what each sequence adds to the losses of all layers, and how each layer routed it.

    The first, [B], is what is differentiated: None where nothing is added.
    """
    layers: dict[int, RoutedLayer] = {}
    gradient_B: torch.Tensor | None = None
    for layer, routed in sorted(notes.routed.items()):
        right_NK = routed.chosen_NK
        if isinstance(notes, ForcedRoutingNotes):
            right_NK = notes.unforced.get(layer, right_NK)
        loss_B, layers[layer] = _layer_losses(plan, routed, right_NK, state, layer)
        gradient_B = loss_B if gradient_B is None else gradient_B + loss_B
    balance = plan.mathematics.balance
    wanted = balance.has_aux or balance.z_coefficient > 0
    return gradient_B if wanted else None, layers


def _layer_losses(
    plan: Plan, routed: ReferenceRouting, right_NK: torch.Tensor, state: RoutingState, layer: int
) -> tuple[torch.Tensor, RoutedLayer]:
    mathematics = plan.mathematics
    balance, experts = mathematics.balance, plan.model.experts
    assert experts is not None, "only a layer with experts routes"
    num_sequences, size = mathematics.global_sequences, experts.num_experts

    def by_sequence(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, num_sequences)).transpose(0, 1)

    p_BTE = by_sequence(probabilities(routed.scores_NE, experts))
    chosen_BTK = by_sequence(routed.chosen_NK)
    counts_BE = torch.stack([torch.bincount(c.reshape(-1), minlength=size) for c in chosen_BTK])
    counts_E = counts_BE.sum(0)
    dtype, tokens = p_BTE.dtype, plan.tokens_per_step
    aux_B, told = p_BTE.new_zeros(num_sequences), 0.0
    if balance.has_aux:
        factor = balance.aux_coefficient * size / tokens
        own_E = (counts_E.double() / counts_E.sum()).to(dtype)
        p_BE = p_BTE.sum(1)
        if balance.aux_over == "global":
            aux_B = factor * (p_BE * state.shares[layer]).sum(-1)
            told = factor * float((p_BE.detach() * own_E).sum())
        else:
            group = 1 if balance.aux_over == "sequence" else plan.layout.microbatch_sequences
            together = counts_BE.unflatten(0, (-1, group)).sum(1)
            shares = together.to(dtype) / together.sum(-1, keepdim=True)
            aux_B = factor * (p_BE * shares.repeat_interleave(group, dim=0)).sum(-1)
            told = float(aux_B.detach().sum())
    z_B = p_BTE.new_zeros(num_sequences)
    if balance.z_coefficient:
        z_BT = by_sequence(routed.logits_NE.logsumexp(-1).square())
        z_B = balance.z_coefficient / tokens * z_BT.sum(1)
    kept_BTK = by_sequence(routed.kept_NK)
    wanted_NE = routed.scores_NE.detach()
    if layer in state.biases:
        wanted_NE = wanted_NE + state.biases[layer].to(wanted_NE.dtype)
    return aux_B + z_B, RoutedLayer(
        picked_BTK=chosen_BTK,
        right_BTK=by_sequence(right_NK),
        kept_BTK=kept_BTK,
        wanted_BTE=by_sequence(wanted_NE),
        gates_BTK=by_sequence(routed.gates_NK.detach()),
        counts_E=counts_E,
        dropped=int((~kept_BTK).sum()),
        aux_loss=told,
        z_loss=float(z_B.detach().sum()),
    )
