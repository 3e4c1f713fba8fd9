# SPDX-License-Identifier: Apache-2.0
"""A gradient as a sum over context ranks, cut in two ways: by tokens lost, and by rows computed.

The loss of a rank's own positions has a gradient; so have the rows of weights' inputs and outputs
that a rank computes with, wherever the losses behind them are. Both add up to the whole. A rank's
gradients before they are summed are of the second kind; a rank that weighs its own loss wrong gives
the first.

Shape suffixes: B sequences of the global batch, T positions; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.plan import Plan
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.operations import Operations
from echelon.proof.causes.token_ranks import context_positions
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.losses import loss_of_sequences
from echelon.proof.oracle.oracle import OracleStep, build_decoder, token_losses

DataContextRank = tuple[int, int]
"""(data-parallel rank, context rank)."""

GradientParts = Mapping[DataContextRank, torch.Tensor]


class WeightsByContextRank(Operations):
    """Let the rows of each context rank meet copies of the weights of their own."""

    def __init__(self, rank_T: torch.Tensor, degree: int) -> None:
        """Take position t for one of rank ``rank_T[t]`` of `degree`."""
        self.rank_T, self.degree = rank_T, degree
        self._copies: dict[tuple[int, int], torch.Tensor] = {}

    def copy(self, weight: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the copy of a rank."""
        key = id(weight), rank
        if key not in self._copies:
            self._copies[key] = weight.clone()
        return self._copies[key]

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        return self._each(lambda own: Operations.embed(self, own(weight_VD), own(positions), batch))

    def norm(
        self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float
    ) -> torch.Tensor:
        return self._each(lambda own: Operations.norm(self, x, own(weight), own(bias), eps))

    def project_in(self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]) -> torch.Tensor:
        return torch.cat([self.project_out(x_ND, linear) for linear in linears], dim=-1)

    def project_out(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return self._each(lambda own: fn.linear(x, own(linear.weight), own(linear.bias)))

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        return self._each(lambda own: Operations.logits(self, x_ND, own(weight_VD)))

    def _each(self, call: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return the rows of each rank as `call` gives them with its copies."""
        whole: torch.Tensor | None = None
        for rank in range(self.degree):

            def own(weight: torch.Tensor | None, rank: int = rank) -> torch.Tensor | None:
                return None if weight is None else self.copy(weight, rank)

            part = call(own)
            mine = (self.rank_T == rank).repeat_interleave(part.shape[0] // len(self.rank_T))
            part = part * mine.view(-1, *[1] * (part.dim() - 1))
            whole = part if whole is None else whole + part
        assert whole is not None
        return whole


def _sums_by_rank(plan: Plan, values_BT: torch.Tensor) -> dict[DataContextRank, torch.Tensor]:
    """Return the sum over the positions of each context rank of each data-parallel rank."""
    rank_T = context_positions(plan.placement).rank_T
    return {
        (dp, cp): rows[:, rank_T == cp].sum()
        for dp, rows in enumerate(values_BT.chunk(plan.mesh.dp))
        for cp in range(plan.mesh.cp)
    }


def tokens_by_context_rank(plan: Plan, step: int) -> dict[DataContextRank, int]:
    """Return the valid tokens of each context rank of each data-parallel rank."""
    valid_BT = global_batch(plan, step).labels_BT != IGNORED_LABEL
    return {place: int(count) for place, count in _sums_by_rank(plan, valid_BT).items()}


def means_by_context_rank(plan: Plan, oracle: OracleStep) -> dict[DataContextRank, float]:
    """Return the mean loss of the positions of each context rank that has valid ones."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    with torch.no_grad():
        losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    tokens = tokens_by_context_rank(plan, oracle.step)
    totals = _sums_by_rank(plan, losses_BT)
    return {at: float(total) / tokens[at] for at, total in totals.items() if tokens[at]}


def loss_gradients_by_rank(plan: Plan, oracle: OracleStep, name: str) -> GradientParts:
    """Return the gradient of `name` that the losses of each rank's positions give."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    parameter = model.get_parameter(name)
    return {
        place: torch.autograd.grad(total, parameter, retain_graph=True)[0]
        for place, total in _sums_by_rank(plan, losses_BT / oracle.tokens).items()
    }


def row_gradients_by_rank(plan: Plan, oracle: OracleStep, name: str) -> GradientParts:
    """Return the gradient of `name` that the rows of each rank give."""
    split = WeightsByContextRank(context_positions(plan.placement).rank_T, plan.mesh.cp)
    model = build_decoder(
        plan, oracle.before, split, routing=oracle.routing, rounding=oracle.rounding
    )
    loss_B = loss_of_sequences(plan, model, oracle)
    parameter = model.get_parameter(name)
    copies = [split.copy(parameter, cp) for cp in range(plan.mesh.cp)]
    parts: dict[DataContextRank, torch.Tensor] = {}
    for dp, rows in enumerate(loss_B.chunk(plan.mesh.dp)):
        found = torch.autograd.grad(rows.sum(), copies, retain_graph=True, allow_unused=True)
        for cp, gradient in enumerate(found):
            parts[dp, cp] = torch.zeros_like(parameter) if gradient is None else gradient
    return parts
