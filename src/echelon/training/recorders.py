# SPDX-License-Identifier: Apache-2.0
"""What a rank writes down of a step for the prover: activations and routes, token by token.

Activations are what passed the boundaries of its blocks, forward and backward. A route says to
which experts a layer sent a token.

Shape suffixes: n tokens of this rank, N tokens of a microbatch, W numbers of each (hidden, or
experts), E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from echelon.models.batch import TokenBatch
from echelon.models.decoder import listen_to_boundaries
from echelon.models.moe import token_numbers
from echelon.parallel.expert import LayerLoad
from echelon.parallel.expert.router import RoutedTokens, TokenRouting
from echelon.parallel.operations import RankOperations
from echelon.parallel.vocabulary import stream_rows
from echelon.training.diagnosis import find_routers, listen_to
from echelon.training.engine import TrainEngine
from echelon.training.observer import RoutingSummary
from echelon.training.steps.part import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedActivation:
    """Hold what passed a boundary on this rank: a row [W] for each token.

    `tokens_n` are numbers of tokens (sample id x sequence length + position), a token once for
    each time that it passed. `gradient` says that it is the gradient of the mean loss (times the
    loss scale) there, `recomputed` that it passed a second time, in backward.
    """

    name: str
    gradient: bool
    recomputed: bool
    tokens_n: torch.Tensor
    values_nW: torch.Tensor


_Kind = tuple[str, bool, bool]
"""Name of a boundary, whether it is a gradient, whether it passed a second time."""


class ActivationRecorder:
    """Listen to the blocks and routers of an engine."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._parts: dict[_Kind, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._passed: set[tuple[str, int]] = set()
        self._tokens: dict[int, tuple[TokenBatch, torch.Tensor]] = {}
        for stage in engine.model.stages.values():
            listen_to_boundaries(stage, self._hear)
        for router in find_routers(engine.model.stages.values()):
            router.on_scores = self._scores
            listen_to(router, self._routed)

    def start_step(self) -> None:
        """Forget the step before."""
        self._parts.clear()
        self._passed.clear()
        self._tokens.clear()

    def recorded(self) -> Iterator[RecordedActivation]:
        """Yield what passed each boundary in the step."""
        for (name, gradient, recomputed), parts in self._parts.items():
            yield RecordedActivation(
                name=name,
                gradient=gradient,
                recomputed=recomputed,
                tokens_n=torch.cat([tokens_n for tokens_n, _ in parts]),
                values_nW=torch.cat([values_nW for _, values_nW in parts]),
            )

    def _hear(self, name: str, x_ND: torch.Tensor, batch: TokenBatch) -> None:
        """Keep what passes a boundary, and its gradient when that comes."""
        self._keep(name, id(batch), self._tokens_of(batch), x_ND)
        if x_ND.requires_grad and torch.is_grad_enabled():
            tokens_n = self._tokens_of(batch)

            def on_gradient(dx_ND: torch.Tensor) -> None:
                self._add((name, True, False), tokens_n, dx_ND)

            x_ND.register_hook(on_gradient)

    def _scores(self, layer: int, tokens: RoutedTokens, scores_nE: torch.Tensor) -> None:
        balancer = self._engine.model.balancer
        bias_E = None if balancer is None else balancer.biases.get(layer)
        wanted_nE = scores_nE if bias_E is None else scores_nE + bias_E.to(scores_nE.dtype)
        microbatch = self._engine.groups.recorder.microbatch or 0
        self._keep(f"layers.{layer}.scores", microbatch, tokens.number_n, wanted_nE)

    def _routed(
        self, x_nD: torch.Tensor, _: object, layer: int, tokens: RoutedTokens, routed: TokenRouting
    ) -> None:
        """Keep the gates of a route, each at its expert: their order says nothing."""
        gates_nK = routed.gates_nK.detach()
        experts = self._engine.plan.model.experts
        assert experts is not None, "only a layer with experts routes"
        gates_nE = gates_nK.new_zeros(len(x_nD), experts.num_experts)
        gates_nE.scatter_(1, routed.chosen_nK, gates_nK)
        microbatch = self._engine.groups.recorder.microbatch or 0
        self._keep(f"layers.{layer}.gates", microbatch, tokens.number_n, gates_nE)

    def _keep(self, name: str, of: int, tokens_n: torch.Tensor, values_nW: torch.Tensor) -> None:
        again = (name, of) in self._passed
        self._passed.add((name, of))
        self._add((name, False, again), tokens_n, values_nW)

    def _add(self, kind: _Kind, tokens_n: torch.Tensor, values_nW: torch.Tensor) -> None:
        # A copy: the engine goes on to compute in this memory.
        kept = values_nW.detach().to("cpu", copy=True)
        self._parts.setdefault(kind, []).append((tokens_n.cpu(), kept))

    def _tokens_of(self, batch: TokenBatch) -> torch.Tensor:
        """Return the numbers of the tokens whose rows this rank has in the residual stream."""
        if id(batch) not in self._tokens:
            stage = next(iter(self._engine.model.stages.values()))
            operations = stage.operations
            assert isinstance(operations, RankOperations), "a rank computes as a rank"
            device = batch.tokens_N.device
            rows_n = stream_rows(batch.tokens_N.numel(), operations.split, device)
            # The batch is held: its identity is not given to another one meanwhile.
            self._tokens[id(batch)] = batch, token_numbers(batch)[rows_n]
        return self._tokens[id(batch)][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRoute:
    """Say where one layer sent the rows of a microbatch that this rank routed.

    Row i is token `tokens[i]` of all (sample id x sequence length + position); it goes to the
    experts `chosen[i]`, as far as `kept[i]` says that they have room.
    """

    layer: int
    microbatch: int
    tokens: tuple[int, ...]
    chosen: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[bool, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRouting:
    """Say how a rank routed in one step, and what its routers know after it.

    `routes` are those of its own rows, `loads` of its layers over the whole global batch,
    `summary` of the whole model; `biases` and `shares` are those of the next step, by layer.
    """

    routes: tuple[RecordedRoute, ...]
    loads: Mapping[int, LayerLoad]
    summary: RoutingSummary
    biases: Mapping[int, tuple[float, ...]]
    shares: Mapping[int, tuple[float, ...]]


class RoutingRecorder:
    """Listen to the routers of an engine."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._routes: dict[tuple[int, int], RecordedRoute] = {}
        for router in find_routers(engine.model.stages.values()):
            listen_to(router, self._note)

    def start_step(self) -> None:
        """Forget the step before."""
        self._routes.clear()

    def step_routing(self, result: StepResult) -> RecordedRouting | None:
        """Return what there is to say of the step with this result; nothing of a dense model."""
        balancer = self._engine.model.balancer
        if balancer is None or result.routing is None:
            return None
        return RecordedRouting(
            routes=tuple(self._routes[key] for key in sorted(self._routes)),
            loads=result.loads,
            summary=result.routing,
            biases=_numbers(balancer.biases),
            shares=_numbers(balancer.shares),
        )

    def _note(
        self, _x: object, _weight: object, layer: int, tokens: RoutedTokens, routed: TokenRouting
    ) -> None:
        """Keep a route; one that is computed again takes the place of the first."""
        microbatch = self._engine.groups.recorder.microbatch or 0
        kept_nK = routed.kept_nK
        if kept_nK is None:
            kept_nK = torch.ones_like(routed.chosen_nK, dtype=torch.bool)
        self._routes[layer, microbatch] = RecordedRoute(
            layer=layer,
            microbatch=microbatch,
            tokens=tuple(tokens.number_n.tolist()),
            chosen=tuple(tuple(row) for row in routed.chosen_nK.tolist()),
            kept=tuple(tuple(row) for row in kept_nK.tolist()),
        )


def _numbers(vectors: Mapping[int, torch.Tensor]) -> dict[int, tuple[float, ...]]:
    return {layer: tuple(vector.tolist()) for layer, vector in vectors.items()}
