# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on one device, by autograd: every expert in turn, nothing sent.

What the prover's oracle computes with. It notes how each layer routed its tokens
(`ReferenceRouting`), from which the oracle makes the losses and the loads.

Shape suffixes: N tokens (sequence first), D hidden, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch

from echelon.core.experts import Balance
from echelon.models.batch import TokenBatch
from echelon.models.moe import Expert, MixtureOfExperts, router_logits
from echelon.models.routing import choose_experts, gates_of, kept_assignments, scores_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRouting:
    """Say how one layer routed the tokens of a batch; `kept_NK` says what was not dropped."""

    logits_NE: torch.Tensor
    scores_NE: torch.Tensor
    chosen_NK: torch.Tensor
    gates_NK: torch.Tensor
    kept_NK: torch.Tensor


@dataclass(slots=True, kw_only=True)
class RoutingNotes:
    """Say by which rule tokens are routed and with which biases; keep how they were, by layer."""

    balance: Balance = field(default_factory=Balance)
    biases: Mapping[int, torch.Tensor] = field(default_factory=dict)
    routed: dict[int, ReferenceRouting] = field(default_factory=dict)


def mixture_reference(
    x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch, notes: RoutingNotes
) -> torch.Tensor:
    """Return the weighted sum of what its experts make of each token; tell `notes` of the route."""
    routed = route_reference(x_ND, mixture, batch, notes)
    notes.routed[mixture.layer] = routed
    return mix_experts(x_ND, mixture, routed)


def mix_experts(
    x_ND: torch.Tensor, mixture: MixtureOfExperts, routed: ReferenceRouting
) -> torch.Tensor:
    """Return the weighted sum of what the experts of each token make of it, routed so."""
    y_ND = torch.zeros_like(x_ND)
    for name, expert in mixture.experts.items():
        token, place = torch.nonzero((routed.chosen_NK == int(name)) & routed.kept_NK).unbind(-1)
        gates = routed.gates_NK[token, place]
        # An expert without tokens takes part with none: its gradient is zero, not missing.
        y_ND = y_ND.index_add(0, token, cast(Expert, expert).weighted(x_ND[token], gates))
    if hasattr(mixture, "shared"):
        y_ND = y_ND + mixture.shared(x_ND)
    return y_ND


def route_reference(
    x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch, notes: RoutingNotes
) -> ReferenceRouting:
    """Return where the tokens of whole sequences go."""
    experts, balance = mixture.routing, notes.balance
    logits_NE = router_logits(mixture, x_ND)
    scores_NE = scores_of(logits_NE, experts)
    bias_E = notes.biases.get(mixture.layer)
    chosen_NK = choose_experts(scores_NE, bias_E, token_numbers(batch), experts, balance)
    gates_NK = gates_of(scores_NE, chosen_NK, experts)
    room = balance.capacity(batch.whole_length, experts.num_experts, experts.top_k)
    kept_NK = torch.ones_like(chosen_NK, dtype=torch.bool)
    if room is not None:
        sequence_N = torch.arange(len(x_ND), device=x_ND.device) % batch.num_sequences
        kept_NK = kept_assignments(
            chosen_NK,
            gates_NK,
            sequence_N,
            num_experts=experts.num_experts,
            capacity=room,
            drop=balance.drop,
        )
    return ReferenceRouting(
        logits_NE=logits_NE,
        scores_NE=scores_NE,
        chosen_NK=chosen_NK,
        gates_NK=gates_NK,
        kept_NK=kept_NK,
    )


def token_numbers(batch: TokenBatch) -> torch.Tensor:
    """Return a number of each token, int64 [N]: neighbours in a sequence are consecutive."""
    positions_T = batch.positions_T
    return (
        positions_T[:, None] + batch.sample_ids_B.to(positions_T.device) * batch.whole_length
    ).reshape(-1)
