# SPDX-License-Identifier: Apache-2.0
"""The router on one rank: each tensor rank routes its own rows, and notes what it did.

Sent:  where a loss or a capacity is by sequence, a few whole numbers for each token, among the
       ranks that hold tokens of the same sequences; else nothing.
Bytes: `sequence_bytes` in `cost/bytes/expert_sent.py`.

Scores are computed in at least float32. The losses of a router hang on the gates of its tokens
(`AttachLoss`): they need nothing of later layers, and no stage of a pipeline sends them.

Shape suffixes: n tokens of this rank, B sequences, D hidden, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.models.moe import (
    choose_experts,
    counts_of,
    gates_of,
    kept_assignments,
    probabilities,
    scores_of,
)
from echelon.models.precision import at_least_fp32
from echelon.parallel.expert.balance import Balancer, RoutingStatistics
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.rows import gathered_rows, own_rows


class RouterLinear(torch.autograd.Function):
    """The logits of a router, in at least float32; its weight gradient goes to the store."""

    @staticmethod
    def forward(
        ctx: Any,
        x_nD: torch.Tensor,
        weight_ED: nn.Parameter,
        store: GradientStore,
        bias_E: nn.Parameter | None = None,
    ) -> torch.Tensor:
        """Return logits_nE."""
        ctx.save_for_backward(x_nD)
        ctx.weight, ctx.bias, ctx.store = weight_ED, bias_E, store
        wide = at_least_fp32(x_nD.dtype)
        bias = None if bias_E is None else bias_E.to(wide)
        return fn.linear(x_nD.to(wide), weight_ED.to(wide), bias)

    @staticmethod
    def backward(ctx: Any, dy_nE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx; the weight gradient is put off."""
        x_nD = ctx.saved_tensors[0].detach()
        weight: nn.Parameter = ctx.weight
        store: GradientStore = ctx.store
        dy_nE = dy_nE.contiguous()
        if ctx.bias is not None:
            store.defer(partial(store.add, ctx.bias, dy_nE.sum(0)))
        dx_nD = (dy_nE @ weight.to(dy_nE.dtype)).to(x_nD.dtype)
        store.defer(lambda: _add_weight(store, weight, dy_nE, x_nD.to(dy_nE.dtype)))
        store.run_deferred()
        return dx_nD, None, None, None


def _add_weight(
    store: GradientStore, weight: nn.Parameter, dy_nE: torch.Tensor, x_nD: torch.Tensor
) -> None:
    """Add dy^T x to the gradient; where that has another dtype, it is rounded once, as a whole."""
    if store.widens(weight, x_nD.dtype):
        store.add(weight, dy_nE.t() @ x_nD)
    else:
        store.add_matmul([weight], dy_nE, x_nD)


class AttachLoss(torch.autograd.Function):
    """Pass on the gates; in backward their losses begin, too, times `scale`."""

    @staticmethod
    def forward(ctx: Any, gates_nK: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the gates."""
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return gates_nK.view_as(gates_nK)

    @staticmethod
    def backward(ctx: Any, dy_nK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradient of the gates, and that of the loss: its scale."""
        return dy_nK, torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTokens:
    """Say which tokens of a microbatch this rank routes.

    Row i is token `key_n[i]` of the microbatch (position x sequences + sequence) and number
    `number_n[i]` of all; sequences have `length` tokens.
    """

    key_n: torch.Tensor
    number_n: torch.Tensor
    num_sequences: int
    length: int

    @property
    def sequence_n(self) -> torch.Tensor:
        """Return the sequence of each row."""
        return self.key_n % self.num_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRouting:
    """Say where tokens go, with which weight, and what of it is dropped (None: nothing)."""

    gates_nK: torch.Tensor
    chosen_nK: torch.Tensor
    kept_nK: torch.Tensor | None


class Router:
    """Route the tokens of one rank."""

    def __init__(self, balancer: Balancer, sequence: Group, store: GradientStore) -> None:
        """Agree with the ranks of `sequence` on what is counted by sequence.

        `on_scores` may be set: it learns the scores of every token, before any is chosen.
        """
        self.balancer, self._sequence, self._store = balancer, sequence, store
        self.on_scores: Callable[[int, RoutedTokens, torch.Tensor], None] | None = None

    def route(
        self,
        x_nD: torch.Tensor,
        weight_ED: nn.Parameter,
        layer: int,
        tokens: RoutedTokens,
        *,
        train: bool,
        bias_E: nn.Parameter | None = None,
    ) -> TokenRouting:
        """Return where the rows of x go; in training, note it and attach the losses."""
        experts, balance = self.balancer.experts, self.balancer.balance
        logits_nE: torch.Tensor = RouterLinear.apply(x_nD, weight_ED, self._store, bias_E)
        scores_nE = scores_of(logits_nE, experts)
        if self.on_scores is not None:
            self.on_scores(layer, tokens, scores_nE)
        moved_E = self.balancer.biases.get(layer)
        chosen_nK = choose_experts(scores_nE, moved_E, tokens.number_n, experts, balance)
        gates_nK = gates_of(scores_nE, chosen_nK, experts)
        kept_nK = self._kept(chosen_nK, gates_nK, tokens)
        if train:
            counts_E = counts_of(chosen_nK, experts.num_experts)
            none = logits_nE.new_zeros(())
            aux_loss = z_loss = none
            probabilities_E = torch.zeros_like(counts_E)
            if balance.has_aux:
                p_nE = probabilities(scores_nE, experts)
                shares_nE = self._shares(layer, chosen_nK, tokens)
                aux_loss = (p_nE * shares_nE).sum() * self.balancer.loss_factor
                probabilities_E = p_nE.detach().sum(0, dtype=torch.float64)
            if balance.z_coefficient:
                z_loss = logits_nE.logsumexp(-1).square().sum() * self.balancer.z_factor
            if balance.has_aux or balance.z_coefficient:
                scale = self.balancer.loss_scale
                gates_nK = AttachLoss.apply(gates_nK, aux_loss + z_loss, scale)
            dropped = none if kept_nK is None else (~kept_nK).sum()
            noted = RoutingStatistics(
                counts_E=counts_E,
                probabilities_E=probabilities_E,
                dropped=dropped,
                aux_loss=aux_loss.detach(),
                z_loss=z_loss.detach(),
            )
            self.balancer.record(layer, noted)
        return TokenRouting(gates_nK=gates_nK, chosen_nK=chosen_nK, kept_nK=kept_nK)

    def _shares(self, layer: int, chosen_nK: torch.Tensor, tokens: RoutedTokens) -> torch.Tensor:
        """Return the share of assignments of each expert, [n, E] or [1, E]."""
        balance, size = self.balancer.balance, self.balancer.experts.num_experts
        if balance.aux_over == "global":
            return self.balancer.shares[layer][None]
        by_sequence = balance.aux_over == "sequence"
        scopes = tokens.num_sequences if by_sequence else 1
        scope_n = tokens.sequence_n if by_sequence else torch.zeros_like(tokens.key_n)
        place_nK = scope_n[:, None] * size + chosen_nK
        counts = counts_of(place_nK, scopes * size).view(scopes, size)
        self._sequence.all_reduce(counts, name="router.counts").wait()
        shares = counts.to(self.balancer.dtype) / counts.sum(-1, keepdim=True)
        return shares[scope_n]

    def _kept(
        self, chosen_nK: torch.Tensor, gates_nK: torch.Tensor, tokens: RoutedTokens
    ) -> torch.Tensor | None:
        """Return what experts have room for, as all ranks with these sequences decide alike."""
        experts, balance = self.balancer.experts, self.balancer.balance
        room = balance.capacity(tokens.length, experts.num_experts, experts.top_k)
        if room is None:
            return None
        gates_nK = gates_nK.detach()
        rows = torch.cat([tokens.key_n[:, None], chosen_nK], dim=1)
        rows_N = gathered_rows(rows, self._sequence, "router.choices")
        gates_NK = rows_N  # not read where places decide
        if balance.drop == "score":
            gates_NK = gathered_rows(gates_nK, self._sequence, "router.gates")
        order = rows_N[:, 0].argsort()
        kept_NK = kept_assignments(
            rows_N[order, 1:],
            gates_NK[order],
            rows_N[order, 0] % tokens.num_sequences,
            num_experts=experts.num_experts,
            capacity=room,
            drop=balance.drop,
        )
        whole_NK = torch.empty_like(kept_NK)
        whole_NK[order] = kept_NK
        return whole_NK[own_rows(len(whole_NK), self._sequence)]
