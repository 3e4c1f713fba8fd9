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
from echelon.prove.batches import global_batch
from echelon.prove.context_places import context_places
from echelon.prove.oracle import OracleStep, build_decoder, token_losses
from echelon.prove.whole_loss import loss_of_sequences

Place = tuple[int, int]
"""(data-parallel rank, context rank)."""

Parts = Mapping[Place, torch.Tensor]


class SplitWeights(Operations):
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
        """Return x_ND."""
        return self._each(lambda own: Operations.embed(self, own(weight_VD), own(positions), batch))

    def norm(
        self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float
    ) -> torch.Tensor:
        """Return x normalised."""
        return self._each(lambda own: Operations.norm(self, x, own(weight), own(bias), eps))

    def project_in(self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]) -> torch.Tensor:
        """Return the outputs of `linears` side by side."""
        return torch.cat([self.project_out(x_ND, linear) for linear in linears], dim=-1)

    def project_out(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return x through a linear layer."""
        return self._each(lambda own: fn.linear(x, own(linear.weight), own(linear.bias)))

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Return the logits."""
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


def tokens_of_context(plan: Plan, step: int) -> dict[Place, int]:
    """Return the valid tokens of each context rank of each data-parallel rank."""
    valid_BT = global_batch(plan, step).labels_BT != IGNORED_LABEL
    rank_T = context_places(plan.placement).rank_T
    return {
        (dp, cp): int(rows[:, rank_T == cp].sum())
        for dp, rows in enumerate(valid_BT.chunk(plan.mesh.dp))
        for cp in range(plan.mesh.cp)
    }


def means_of_context(plan: Plan, oracle: OracleStep) -> dict[Place, float]:
    """Return the mean loss of the positions of each context rank that has valid ones."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    with torch.no_grad():
        losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    rank_T = context_places(plan.placement).rank_T
    return {
        (dp, cp): float(losses_BT.chunk(plan.mesh.dp)[dp][:, rank_T == cp].sum()) / count
        for (dp, cp), count in tokens_of_context(plan, oracle.step).items()
        if count
    }


def loss_parts(plan: Plan, oracle: OracleStep, name: str) -> Parts:
    """Return the gradient of `name` that the losses of each rank's positions give."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    rank_T, parameter = context_places(plan.placement).rank_T, model.get_parameter(name)
    parts: dict[Place, torch.Tensor] = {}
    for dp, rows in enumerate((losses_BT / oracle.tokens).chunk(plan.mesh.dp)):
        for cp in range(plan.mesh.cp):
            total = rows[:, rank_T == cp].sum()
            parts[dp, cp] = torch.autograd.grad(total, parameter, retain_graph=True)[0]
    return parts


def row_parts(plan: Plan, oracle: OracleStep, name: str) -> Parts:
    """Return the gradient of `name` that the rows of each rank give."""
    split = SplitWeights(context_places(plan.placement).rank_T, plan.mesh.cp)
    model = build_decoder(plan, oracle.before, split, routing=oracle.routing)
    loss_B = loss_of_sequences(plan, model, oracle)
    parameter = model.get_parameter(name)
    copies = [split.copy(parameter, cp) for cp in range(plan.mesh.cp)]
    parts: dict[Place, torch.Tensor] = {}
    for dp, rows in enumerate(loss_B.chunk(plan.mesh.dp)):
        found = torch.autograd.grad(rows.sum(), copies, retain_graph=True, allow_unused=True)
        for cp, gradient in enumerate(found):
            parts[dp, cp] = torch.zeros_like(parameter) if gradient is None else gradient
    return parts
