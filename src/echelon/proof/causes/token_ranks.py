# SPDX-License-Identifier: Apache-2.0
"""Which rank holds each position of a sequence and routes each token; sums over context ranks.

A gradient is a sum over context ranks, cut in two ways. The loss of a rank's own positions has a
gradient; so have the rows of weights' inputs and outputs that a rank computes with, wherever the
losses behind them are. A rank's gradients before they are summed are of the second kind; a rank
that weighs its own loss wrong gives the first.

Shape suffixes: B sequences of the global batch, T positions, N = T * B tokens (sequence first).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.attention_mask import Placement
from echelon.core.plan import Plan
from echelon.cost.bytes.context_sent import kv_copies
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.operations import Operations
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import OracleStep, build_decoder, loss_of_sequences, token_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPositions:
    """Say of each position where it lies: on which ring place, in which run, on which rank.

    `row_T` counts the rows of a ring place, `local_T` those of a context rank, `index_T` those of
    a run; `step_T` is the step of the run.
    """

    placement: Placement
    ring_rank_T: torch.Tensor
    row_T: torch.Tensor
    run_T: torch.Tensor
    index_T: torch.Tensor
    step_T: torch.Tensor
    rank_T: torch.Tensor
    local_T: torch.Tensor

    @property
    def contiguous_T(self) -> torch.Tensor:
        """Return the position that each would have if every rank held one contiguous chunk."""
        return self.rank_T * (self.placement.length // self.placement.degree) + self.local_T

    def moved(self, shift: int) -> torch.Tensor:
        """Return for each position the one in the same row of the ring place `shift` further."""
        return self._at_rows(self.ring_rank_T, self.row_T, self.placement.ring_degree, shift)

    def moved_ranks(self, shift: int) -> torch.Tensor:
        """Return for each position the one in the same row of the context rank `shift` further."""
        return self._at_rows(self.rank_T, self.local_T, self.placement.degree, shift)

    def _at_rows(
        self, owner_T: torch.Tensor, row_T: torch.Tensor, degree: int, shift: int
    ) -> torch.Tensor:
        size = self.placement.length // degree
        key_T = owner_T * size + row_T
        at_T = torch.empty_like(key_T)
        at_T[key_T] = torch.arange(self.placement.length)
        return at_T[(owner_T + shift) % degree * size + row_T]


def context_positions(placement: Placement) -> ContextPositions:
    """Return where the positions of a sequence lie."""
    names = ("ring_rank_T", "row_T", "run_T", "index_T", "step_T", "rank_T", "local_T")
    found = {name: torch.zeros(placement.length, dtype=torch.int64) for name in names}
    number = 0
    for place in range(placement.ring_degree):
        row = 0
        for run in placement.ring_runs(place):
            index = torch.arange(run.count)
            positions = [run.position(i) for i in range(run.count)]
            values = (place, row + index, number, index, run.step)
            for name, value in zip(names, values, strict=False):
                found[name][positions] = torch.as_tensor(value)
            row += run.count
            number += 1
    for rank in range(placement.degree):
        for local, position in enumerate(placement.positions(rank)):
            found["rank_T"][position], found["local_T"][position] = rank, local
    return ContextPositions(placement=placement, **found)


def heads_of_member(plan: Plan, member: int) -> list[int]:
    """Return the query heads that one member of each Ulysses group attends with."""
    own = plan.model.heads // plan.mesh.tp
    few = own // plan.layout.context.ulysses_degree
    return [tp * own + member * few + i for tp in range(plan.mesh.tp) for i in range(few)]


def copies_of(plan: Plan) -> int:
    """Return to how many members of a Ulysses group each key/value head is sent."""
    tp, degree = plan.mesh.tp, plan.layout.context.ulysses_degree
    return kv_copies(plan.model.heads // tp, max(1, plan.model.kv_heads // tp), degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Say of each token where it is routed: replica, microbatch, context and tensor rank, and row.

    `row_N` is its place among the rows of that microbatch on that context rank.
    """

    sequence_N: torch.Tensor
    data_N: torch.Tensor
    microbatch_N: torch.Tensor
    context_N: torch.Tensor
    tensor_N: torch.Tensor
    row_N: torch.Tensor

    def scope(self, *names: str) -> torch.Tensor:
        """Return a number for each token, the same for those that have all of `names` alike."""
        scope_N = torch.zeros_like(self.row_N)
        for name in names:
            one_N = getattr(self, f"{name}_N")
            scope_N = scope_N * (int(one_N.max()) + 1) + one_N
        return scope_N.unique(return_inverse=True)[1]


def token_rows(plan: Plan) -> TokenRows:
    """Return where the tokens of a global batch are routed under `plan`."""
    mathematics, size = plan.mathematics, plan.layout.microbatch_sequences
    places = context_positions(plan.placement)
    sequences, length = mathematics.global_sequences, mathematics.sequence_length
    sequence_N = torch.arange(sequences).repeat(length)
    position_N = torch.arange(length).repeat_interleave(sequences)
    microbatch_N = sequence_N // size
    row_N = places.local_T[position_N] * size + sequence_N % size
    rows = length // plan.mesh.cp * size
    return TokenRows(
        sequence_N=sequence_N,
        data_N=microbatch_N // plan.num_microbatches,
        microbatch_N=microbatch_N % plan.num_microbatches,
        context_N=places.rank_T[position_N],
        tensor_N=row_N * plan.mesh.tp // rows,
        row_N=row_N,
    )


def dispatched_tokens(plan: Plan) -> Iterator[torch.Tensor]:
    """Yield the tokens that one rank sends to experts at a time, in the order of its rows."""
    rows = token_rows(plan)
    names = ("data", "microbatch", "context")
    whole = plan.layout.experts.expert_tp == 1
    scope_N = rows.scope(*names, "tensor") if whole else rows.scope(*names)
    for number in range(int(scope_N.max()) + 1):
        tokens = torch.nonzero(scope_N == number)[:, 0]
        in_order = tokens[rows.row_N[tokens].argsort()]
        yield from in_order.chunk(plan.layout.experts.chunks)


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
