# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts part of a block: a router, its experts, and those that every token meets.

Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; Jiang et al., "Mixtral of
Experts", 2024; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2 (sigmoid scores,
groups, shared experts); OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025 (biases, clamped
SwiGLU). Like all modules it holds weights; `Operations.mixture` computes.

`mixture_reference` is a mixture on one device, by autograd: every expert in turn, nothing sent. The
prover's oracle computes with it. It notes how each layer routed its tokens (`ReferenceRouting`),
from which the oracle makes the losses and the loads.

The router's formulas are the same whatever the layout. All of them look at one token at a time, but
for the loads and the room of an expert, so that a token goes to the same experts wherever it is
computed. An expert has room for so many tokens of each sequence; sequences are the same under every
layout, and so are their tokens' places and scores: what is dropped does not depend on how they are
cut. Logits come in at least float32. Of scores that are equal to the last bit, `topk` decides, row
by row.

Shape suffixes: R rows of an expert, N tokens (sequence first), D hidden, F inner width, E experts,
K experts of a token (top_k), G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.experts import Balance, DropRule
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


SMALLEST_SUM = 1e-20
"""Added to a sum of sigmoid scores before it divides: all of them may be 0."""


def scores_of(logits_NE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the scores of a router: a softmax over all experts, or a sigmoid of each."""
    return logits_NE.softmax(-1) if experts.router == "softmax" else logits_NE.sigmoid()


def probabilities(scores_NE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return scores that add up to 1 (DeepSeek-V3, 2024, equation 19)."""
    if experts.router == "softmax":
        return scores_NE
    return scores_NE / (scores_NE.sum(-1, keepdim=True) + SMALLEST_SUM)


@torch.no_grad()
def choose_experts(
    scores_NE: torch.Tensor,
    bias_E: torch.Tensor | None,
    token_N: torch.Tensor,
    experts: Experts,
    balance: Balance,
) -> torch.Tensor:
    """Return the experts of each token, int64 [N, K].

    They are those of the highest scores; the bias takes part in this choice only. `token_N` are
    the global numbers of the tokens, by which `balance.route` sends them elsewhere.
    """
    count, k = experts.num_experts, experts.top_k
    places_K = torch.arange(k, device=scores_NE.device)
    if balance.route == "even":
        return (token_N[:, None] * k + places_K) % count
    if balance.route == "one":
        return places_K.expand(len(token_N), k).contiguous()
    wanted_NE = scores_NE if bias_E is None else scores_NE + bias_E.to(scores_NE.dtype)
    if balance.route == "not-last" and count > k:
        wanted_NE = wanted_NE.clone()
        wanted_NE[:, -1] = -torch.inf
    if experts.groups > 1:
        wanted_NE = _within_best_groups(wanted_NE, experts)
    return wanted_NE.topk(k, dim=-1).indices


def gates_of(scores_NE: torch.Tensor, chosen_NK: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the weights of a token's experts, [N, K]; the gradient goes through the scores."""
    gates_NK = scores_NE.gather(-1, chosen_NK)
    if experts.renormalise:
        gates_NK = gates_NK / (gates_NK.sum(-1, keepdim=True) + SMALLEST_SUM)
    return gates_NK * experts.gate_scale


def counts_of(chosen_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how many tokens chose each expert, int64 [E]; no host waits for it."""
    chosen = chosen_NK.reshape(-1)
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def _within_best_groups(wanted_NE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the scores with those outside of the best groups at minus infinity."""
    wanted_NGE = wanted_NE.unflatten(-1, (experts.groups, -1))
    count = 1 if experts.group_score == "max" else min(2, wanted_NGE.shape[-1])
    best_NG = wanted_NGE.topk(count, dim=-1).values.sum(-1)
    kept = best_NG.topk(experts.top_groups, dim=-1).indices
    outside_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter(-1, kept, False)
    return wanted_NGE.masked_fill(outside_NG[..., None], -torch.inf).flatten(-2)


@torch.no_grad()
def kept_assignments(
    chosen_NK: torch.Tensor,
    gates_NK: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    num_experts: int,
    capacity: int,
    drop: DropRule,
) -> torch.Tensor:
    """Return which assignments are kept, bool [N, K]: of each sequence and expert the first ones.

    Tokens of a sequence are given in the order of their positions. The first are the earliest
    ("position"), or those with the highest gates, of equal ones the earlier ("score").
    """
    place = sequence_N[:, None] * num_experts + chosen_NK
    order = torch.arange(place.numel(), device=place.device)
    if drop == "score":
        order = torch.sort(gates_NK.reshape(-1), descending=True, stable=True).indices
    # Assignments to one expert of one sequence side by side, each run in the order of preference.
    by_place = torch.sort(place.reshape(-1)[order], stable=True)
    order, sorted_place = order[by_place.indices], by_place.values
    index = torch.arange(len(order), device=place.device)
    starts = torch.ones_like(index, dtype=torch.bool)
    starts[1:] = sorted_place[1:] != sorted_place[:-1]
    first = torch.where(starts, index, 0).cummax(0).values
    result = torch.empty_like(index, dtype=torch.bool)
    result[order] = index - first < capacity
    return result.view_as(place)
