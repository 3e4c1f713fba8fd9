# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: the mixture of experts of a block on one rank.

Split: the experts over `ep`, a view folded over dp_shard x cp (x tp where experts are whole); each
       expert into `expert_tp` pieces, like a dense MLP.
Sent:  `token_dispatcher.py` says how among the expert group. Among tensor ranks: whole experts and
       a whole stream: the outputs of the rows that each routed (all-gather), and in backward their
       gradients. Experts in pieces: rows, gates and choices (all-gather) before, the sum after.
Bytes: `expert_bytes` in `cost/bytes/expert_sent.py`.
Must divide: what `token_dispatcher.py` says; tp | tokens of a microbatch on a rank.
Source: Lepikhin et al., "GShard", 2020; Singh et al., "A Hybrid Tensor-Expert-Data Parallelism
        Approach to Optimize Mixture-of-Experts Training", 2023.

While tokens travel to their experts, those experts compute that every token meets, and in chunks
the rows of the chunk before. In backward it is the same: autograd runs what was built later first.

Shape suffixes: N tokens of the stream, n those that this rank routes, m those that it dispatches,
K experts of a token, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from echelon.core.plan import Plan
from echelon.layout.expert_load import even_pairs, kept_assignments, slots_per_expert
from echelon.layout.stage import RankPart
from echelon.models.batch import TokenBatch
from echelon.models.moe import MixtureOfExperts, token_numbers
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.expert.balance import Balancer
from echelon.parallel.expert.feed_forward import ExpertFeedForward, Fp8ExpertFeedForward
from echelon.parallel.expert.grouped_matmul import needs_no_counts
from echelon.parallel.expert.router import RoutedTokens, Router, TokenRouting
from echelon.parallel.expert.token_dispatcher import (
    AwaitRows,
    FlatTokenDispatcher,
    PaddedTokenDispatcher,
    TwoHopTokenDispatcher,
)
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.tensor import TensorSplit
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.rows import (
    GATHER_ROWS,
    OWN_ROWS,
    SCATTER_ROWS,
    SUM_GRADIENT,
    SUM_ROWS,
    WHOLE_ROWS,
    MoveRows,
    gathered_rows,
    own_rows,
)

TokenDispatcher = FlatTokenDispatcher | TwoHopTokenDispatcher | PaddedTokenDispatcher
"""What carries rows between tokens and experts; its two motions are each other's transpose."""

_Motion = Literal["dispatch", "combine"]


@dataclass(slots=True)
class _TokensInFlight:
    """What is under way between two functions of one chunk, forward or backward."""

    dispatcher: TokenDispatcher
    store: GradientStore
    await_rows: AwaitRows | None = None

    def start(
        self, motion: _Motion, rows: torch.Tensor, gates: torch.Tensor | None, name: str
    ) -> torch.Tensor:
        """Start a motion of rows (and gates); return an empty tensor, the edge of the graph."""
        dispatcher = self.dispatcher
        move = dispatcher.dispatch if motion == "dispatch" else dispatcher.combine
        self.await_rows = move(rows, gates, name=name)
        return rows.new_empty(0)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute weight gradients that wait, then wait for what is under way."""
        arrival, self.await_rows = self.await_rows, None
        assert arrival is not None, "nothing is under way"
        self.store.run_deferred()
        return arrival()


class _Start(torch.autograd.Function):
    """Rows leave, to their experts or back to their tokens; in backward their gradients arrive."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        gates: torch.Tensor | None,
        in_flight: _TokensInFlight,
        motion: _Motion,
    ) -> torch.Tensor:
        """Return the edge to `_Finish`; gates go with the rows that are dispatched."""
        ctx.in_flight = in_flight
        return in_flight.start(motion, rows, gates, f"experts.{motion}")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of rows and gates."""
        return (*ctx.in_flight.wait(), None, None)


class _Finish(torch.autograd.Function):
    """Rows are there; in backward their gradients leave, by the transpose of the motion."""

    @staticmethod
    def forward(
        ctx: Any, edge: torch.Tensor, in_flight: _TokensInFlight, motion: _Motion
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows_RD and gates_R at the experts, or y_mD and None at the tokens."""
        ctx.in_flight, ctx.motion = in_flight, motion
        return in_flight.wait()

    @staticmethod
    def backward(
        ctx: Any, drows: torch.Tensor, dgates: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the edge to the backward of `_Start`."""
        back: _Motion = "combine" if ctx.motion == "dispatch" else "dispatch"
        name = f"experts.{ctx.motion}.backward"
        return ctx.in_flight.start(back, drows.contiguous(), dgates, name), None, None


def make_dispatcher(
    plan: Plan,
    groups: RankGroups,
    routed: TokenRouting,
    tokens: RoutedTokens,
    counted_by_host: bool = True,
) -> TokenDispatcher:
    """Return what carries tokens that are routed so, some of those that `tokens` tells of.

    The host learns how many rows each expert has where it must, or where experts ask for it.
    """
    experts, layout = plan.model.experts, plan.layout.experts
    assert experts is not None, "a dense model dispatches nothing"
    num_experts = experts.num_experts
    rows = kept_assignments(plan) // layout.chunks
    if layout.dispatch == "two-hop":
        across, within = groups.expert_across, groups.expert_within
        return TwoHopTokenDispatcher(
            routed,
            num_experts,
            across,
            within,
            (even_pairs(plan, across.size) // layout.chunks, rows),
        )
    if not layout.padded:
        return FlatTokenDispatcher(
            routed, num_experts, groups.expert, even_rows=rows, counted_by_host=counted_by_host
        )
    room = plan.mathematics.balance.capacity(tokens.length, num_experts, experts.top_k)
    assert room is not None, "without a capacity there is no size to pad to"
    slots = slots_per_expert(len(routed.chosen_nK), tokens.num_sequences, room)
    return PaddedTokenDispatcher(routed, num_experts, groups.expert, slots)


class ExpertParallel:
    """Run mixtures of experts on one rank."""

    def __init__(self, router: Router, plan: Plan, groups: RankGroups, split: TensorSplit) -> None:
        """Send tokens over the expert groups as `plan` says; `split` is how the stream is cut."""
        self.router, self._split = router, split
        self._layout = plan.layout.experts
        self._make_dispatcher = partial(make_dispatcher, plan, groups)
        self._at_experts = replace(split, exchanges=groups.expert.size > 1)

    @property
    def _whole(self) -> bool:
        """Return whether experts are whole, so that tensor ranks dispatch other tokens."""
        return self._layout.expert_tp == 1

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
                dispatched = MoveRows.apply(x_ND, tensor, "experts.rows", GATHER_ROWS)
        elif self._whole:
            routed_rows = dispatched = MoveRows.apply(x_ND, tensor, "experts.rows", OWN_ROWS)
        else:
            dispatched = MoveRows.apply(x_ND, tensor, "experts.rows", SUM_GRADIENT)
            routed_rows = dispatched[own_rows(len(x_ND), tensor)]
        tokens = self._tokens(batch, routed_rows.device)
        bias = mixture.logit_bias.weight if mixture.routing.logit_bias else None
        routed = self.router.route(
            *(routed_rows, mixture.router.weight, mixture.layer, tokens),
            train=batch.train,
            bias_E=bias,
        )
        if not self._whole and tensor.size > 1:
            routed = _gathered(routed, tensor)
        y_mD, shared_ND = self._dispatch_and_combine(dispatched, routed, tokens, mixture, x_ND)
        if tensor.size > 1 and not (self._split.scattered and self._whole):
            way = SCATTER_ROWS if self._split.scattered else SUM_ROWS
            way = WHOLE_ROWS if self._whole else way
            y_mD = MoveRows.apply(y_mD, tensor, "experts.output", way)
        return y_mD if shared_ND is None else y_mD + shared_ND

    def _dispatch_and_combine(
        self,
        x_mD: torch.Tensor,
        routed: TokenRouting,
        tokens: RoutedTokens,
        mixture: MixtureOfExperts,
        x_ND: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of routed experts, and of those that every token meets."""
        store, held = self._split.store, mixture.held()
        num_chunks = self._layout.chunks
        parts = _chunks(x_mD, routed, num_chunks)
        counted_by_host = not needs_no_counts(x_mD, held, store)
        all_in_flight: list[_TokensInFlight] = []
        edges: list[torch.Tensor] = []

        def depart() -> None:
            x, one = parts[len(all_in_flight)]
            dispatcher = self._make_dispatcher(one, tokens, counted_by_host)
            all_in_flight.append(_TokensInFlight(dispatcher, store))
            edges.append(_Start.apply(x, one.gates_nK, all_in_flight[-1], "dispatch"))

        depart()
        shared_ND = None
        returns: list[torch.Tensor] = []
        for index in range(num_chunks):
            if index + 1 < num_chunks:
                depart()
            if index == 0 and hasattr(mixture, "shared"):
                shared_ND = mixture.shared(x_ND)
            in_flight = all_in_flight[index]
            rows_RD, gates_R = _Finish.apply(edges[index], in_flight, "dispatch")
            counts = in_flight.dispatcher.rows_by_expert
            compute = Fp8ExpertFeedForward if self._split.fp8_block else ExpertFeedForward
            y_RD = compute.apply(rows_RD, gates_R, held, counts, self._at_experts)
            returns.append(_Start.apply(y_RD, None, in_flight, "combine"))
        outputs = [
            _Finish.apply(edge, one, "combine")[0]
            for edge, one in zip(returns, all_in_flight, strict=True)
        ]
        return outputs[0] if num_chunks == 1 else torch.cat(outputs), shared_ND

    def _tokens(self, batch: TokenBatch, device: torch.device) -> RoutedTokens:
        numbers_N = token_numbers(batch)
        sequences = torch.arange(batch.num_sequences, device=numbers_N.device)
        keys_N = batch.positions_T.to(numbers_N.device)[:, None] * batch.num_sequences + sequences
        mine = own_rows(len(numbers_N), self._split.group)
        return RoutedTokens(
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
    return ExpertParallel(router, plan, groups, split)


def _chunks(
    x_mD: torch.Tensor, routed: TokenRouting, count: int
) -> list[tuple[torch.Tensor, TokenRouting]]:
    if count == 1:
        return [(x_mD, routed)]
    kept = [None] * count if routed.kept_nK is None else routed.kept_nK.chunk(count)
    return [
        (x, TokenRouting(gates_nK=gates, chosen_nK=chosen, kept_nK=keep))
        for x, gates, chosen, keep in zip(
            x_mD.chunk(count),
            routed.gates_nK.chunk(count),
            routed.chosen_nK.chunk(count),
            kept,
            strict=True,
        )
    ]


def _gathered(routed: TokenRouting, tensor: Group) -> TokenRouting:
    """Return how the rows of all tensor ranks were routed, where each has pieces of experts."""
    chosen_NK = routed.chosen_nK
    if routed.kept_nK is not None:
        # What is dropped is told with the choice: as expert -1.
        chosen_NK = chosen_NK.masked_fill(~routed.kept_nK, -1)
    whole_NK = gathered_rows(chosen_NK, tensor, "experts.choices")
    return TokenRouting(
        gates_nK=MoveRows.apply(routed.gates_nK, tensor, "experts.gates", GATHER_ROWS),
        chosen_nK=whole_NK.clamp(min=0),
        kept_nK=None if routed.kept_nK is None else whole_NK >= 0,
    )
