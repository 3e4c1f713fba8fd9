"""Expert parallelism: the mixture of experts of a block on one rank.

Split: the experts over `ep`, a view folded over dp_shard x cp (x tp where experts are whole); each
       expert into `expert_tp` pieces, like a dense MLP.
Sent:  `dispatch.py` says how among the expert group. Among tensor ranks: whole experts and a whole
       stream: the outputs of the rows that each routed (all-gather), and in backward their
       gradients. Experts in pieces: rows, gates and choices (all-gather) before, the sum after.
Bytes: `cost.experts`.
Must divide: what `carrier.py` says; tp | tokens of a microbatch on a rank.
Source: Lepikhin et al., "GShard", 2020; Singh et al., "A Hybrid Tensor-Expert-Data Parallelism
        Approach to Optimize Mixture-of-Experts Training", 2023.

While tokens travel to their experts, those experts compute that every token meets, and in chunks
the rows of the chunk before. In backward it is the same: autograd runs what was built later first.

Shape suffixes: N tokens of the stream, n those that this rank routes, m those that it dispatches,
K experts of a token, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from echelon.core.plan import Plan
from echelon.cost.stage import RankPart
from echelon.models.batch import TokenBatch
from echelon.models.mixture_reference import token_numbers
from echelon.models.moe import MixtureOfExperts
from echelon.parallel.collectives import Group
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.expert.balance import Balancer
from echelon.parallel.expert.carrier import Arrival, Carrier
from echelon.parallel.expert.dispatch import Dispatch
from echelon.parallel.expert.feed_forward import FeedForward
from echelon.parallel.expert.router import Routed, Router, Tokens
from echelon.parallel.gradients import GradientStore
from echelon.parallel.rows import (
    GatherRows,
    OwnRows,
    ScatterRows,
    SumGradient,
    SumRows,
    WholeRows,
)
from echelon.parallel.sequence import own_rows
from echelon.parallel.tensor import TensorSplit


@dataclass(slots=True)
class _Journey:
    """What is under way between two functions of one chunk, forward or backward."""

    carrier: Carrier
    store: GradientStore
    arrival: Arrival | None = None

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute weight gradients that wait, then wait for what is under way."""
        arrival, self.arrival = self.arrival, None
        assert arrival is not None, "nothing is under way"
        self.store.run_deferred()
        return arrival()


def _ticket(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor: the edge of the graph between two ends of a journey."""
    return like.new_empty(0)


class _Depart(torch.autograd.Function):
    """Tokens leave for their experts; in backward their gradients arrive."""

    @staticmethod
    def forward(
        ctx: Any, x_mD: torch.Tensor, gates_mK: torch.Tensor, journey: _Journey
    ) -> torch.Tensor:
        """Return a ticket for `_Arrive`."""
        ctx.journey = journey
        journey.arrival = journey.carrier.scatter(x_mD, gates_mK, name="experts.dispatch")
        return _ticket(x_mD)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of tokens and gates."""
        return (*ctx.journey.take(), None)


class _Arrive(torch.autograd.Function):
    """Tokens are at their experts; in backward their gradients leave."""

    @staticmethod
    def forward(
        ctx: Any, ticket: torch.Tensor, journey: _Journey
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows_RD and gates_R."""
        ctx.journey = journey
        rows_RD, gates_R = journey.take()
        assert gates_R is not None, "each row comes with its gate"
        return rows_RD, gates_R

    @staticmethod
    def backward(
        ctx: Any, drows_RD: torch.Tensor, dgates_R: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return the ticket for `_Depart`'s backward."""
        journey: _Journey = ctx.journey
        journey.arrival = journey.carrier.collect(
            drows_RD.contiguous(), dgates_R, name="experts.dispatch.backward"
        )
        return _ticket(drows_RD), None


class _Return(torch.autograd.Function):
    """What experts made leaves for its tokens; in backward its gradient arrives."""

    @staticmethod
    def forward(ctx: Any, rows_RD: torch.Tensor, journey: _Journey) -> torch.Tensor:
        """Return a ticket for `_Combine`."""
        ctx.journey = journey
        journey.arrival = journey.carrier.collect(rows_RD, None, name="experts.combine")
        return _ticket(rows_RD)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the rows."""
        return ctx.journey.take()[0], None


class _Combine(torch.autograd.Function):
    """What experts made is added up by token; in backward its gradient leaves."""

    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, journey: _Journey) -> torch.Tensor:
        """Return y_mD."""
        ctx.journey = journey
        return journey.take()[0]

    @staticmethod
    def backward(ctx: Any, dy_mD: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the ticket for `_Return`'s backward."""
        journey: _Journey = ctx.journey
        journey.arrival = journey.carrier.scatter(
            dy_mD.contiguous(), None, name="experts.combine.backward"
        )
        return _ticket(dy_mD), None


class ExpertParallel:
    """Run mixtures of experts on one rank."""

    def __init__(self, router: Router, dispatch: Dispatch, split: TensorSplit) -> None:
        """Send tokens as `dispatch` does; `split` is how the stream is cut."""
        self.router, self._dispatch, self._split = router, dispatch, split
        self._at_experts = replace(split, exchanges=dispatch.num_ranks > 1)

    @property
    def balancer(self) -> Balancer:
        """Return what counts the loads of the layers of this rank."""
        return self.router.balancer

    @property
    def _whole(self) -> bool:
        """Return whether experts are whole, so that tensor ranks dispatch other tokens."""
        return self._dispatch.layout.expert_tp == 1

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return what its experts make of each token, [N, D], or this rank's rows of it."""
        tensor = self._split.group
        dispatched = x_ND
        if tensor.size == 1:
            routed_rows = x_ND
        elif self._split.scattered:
            routed_rows = x_ND
            if not self._whole:
                dispatched = GatherRows.apply(x_ND, tensor, "experts.rows")
        elif self._whole:
            routed_rows = dispatched = OwnRows.apply(x_ND, tensor, "experts.rows")
        else:
            dispatched = SumGradient.apply(x_ND, tensor, "experts.rows")
            routed_rows = dispatched[own_rows(len(x_ND), tensor)]
        tokens = self._tokens(batch, routed_rows.device)
        weight = mixture.router.weight
        routed = self.router.route(routed_rows, weight, mixture.layer, tokens, train=batch.train)
        if not self._whole and tensor.size > 1:
            routed = _gathered(routed, tensor)
        y_mD, shared_ND = self._exchanged(dispatched, routed, tokens, mixture, x_ND)
        if tensor.size > 1:
            y_mD = self._joined(y_mD)
        return y_mD if shared_ND is None else y_mD + shared_ND

    def _joined(self, y_mD: torch.Tensor) -> torch.Tensor:
        """Return the stream's rows of what the experts of all tensor ranks gave."""
        tensor, name = self._split.group, "experts.output"
        if self._split.scattered:
            return y_mD if self._whole else ScatterRows.apply(y_mD, tensor, name)
        if self._whole:
            return WholeRows.apply(y_mD, tensor, name)
        return SumRows.apply(y_mD, tensor, name)

    def _exchanged(
        self,
        x_mD: torch.Tensor,
        routed: Routed,
        tokens: Tokens,
        mixture: MixtureOfExperts,
        x_ND: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of routed experts, and of those that every token meets."""
        store, held = self._split.store, mixture.held()
        num_chunks = self._dispatch.layout.chunks
        parts = _chunks(x_mD, routed, num_chunks)
        journeys: list[_Journey] = []
        tickets: list[torch.Tensor] = []

        def depart() -> None:
            x, one = parts[len(journeys)]
            carrier = self._dispatch.carrier(one, tokens)
            journeys.append(_Journey(carrier, store))
            tickets.append(_Depart.apply(x, one.gates_nK, journeys[-1]))

        depart()
        shared_ND = None
        returns: list[torch.Tensor] = []
        for index in range(num_chunks):
            if index + 1 < num_chunks:
                depart()
            if index == 0 and hasattr(mixture, "shared"):
                shared_ND = mixture.shared(x_ND)
            journey = journeys[index]
            rows_RD, gates_R = _Arrive.apply(tickets[index], journey)
            counts = journey.carrier.rows_by_expert
            y_RD = FeedForward.apply(rows_RD, gates_R, held, counts, self._at_experts)
            returns.append(_Return.apply(y_RD, journey))
        outputs = [
            _Combine.apply(ticket, one) for ticket, one in zip(returns, journeys, strict=True)
        ]
        return outputs[0] if num_chunks == 1 else torch.cat(outputs), shared_ND

    def _tokens(self, batch: TokenBatch, device: torch.device) -> Tokens:
        numbers_N = token_numbers(batch)
        sequences = torch.arange(batch.num_sequences, device=numbers_N.device)
        keys_N = batch.positions_T.to(numbers_N.device)[:, None] * batch.num_sequences + sequences
        mine = own_rows(len(numbers_N), self._split.group)
        return Tokens(
            key_n=keys_N.reshape(-1)[mine].to(device),
            number_n=numbers_N[mine].to(device),
            num_sequences=batch.num_sequences,
            length=batch.whole_length,
        )


def expert_parallel(
    plan: Plan, part: RankPart, groups: RankGroups, split: TensorSplit, device: torch.device
) -> ExpertParallel | None:
    """Return what runs the mixtures of a rank; None where the model has none."""
    if plan.model.experts is None:
        return None
    layers = [block for block in part.blocks if plan.model.layer_has_experts(block)]
    balancer = Balancer(plan, groups, layers, device)
    router = Router(balancer, groups.sequence, split.store)
    return ExpertParallel(router, Dispatch(plan, groups), split)


def _chunks(x_mD: torch.Tensor, routed: Routed, count: int) -> list[tuple[torch.Tensor, Routed]]:
    if count == 1:
        return [(x_mD, routed)]
    kept = [None] * count if routed.kept_nK is None else routed.kept_nK.chunk(count)
    return [
        (x, Routed(gates_nK=gates, chosen_nK=chosen, kept_nK=keep))
        for x, gates, chosen, keep in zip(
            x_mD.chunk(count),
            routed.gates_nK.chunk(count),
            routed.chosen_nK.chunk(count),
            kept,
            strict=True,
        )
    ]


def _gathered(routed: Routed, tensor: Group) -> Routed:
    """Return how the rows of all tensor ranks were routed, where each has pieces of experts."""
    chosen_NK = routed.chosen_nK
    if routed.kept_nK is not None:
        # What is dropped is told with the choice: as expert -1.
        chosen_NK = chosen_NK.masked_fill(~routed.kept_nK, -1)
    whole_NK = chosen_NK.new_empty((len(chosen_NK) * tensor.size, chosen_NK.shape[1]))
    tensor.all_gather(whole_NK, chosen_NK.contiguous(), name="experts.choices").wait()
    return Routed(
        gates_nK=GatherRows.apply(routed.gates_nK, tensor, "experts.gates"),
        chosen_nK=whole_NK.clamp(min=0),
        kept_nK=None if routed.kept_nK is None else whole_NK >= 0,
    )
