"""Where a rank sent the tokens of a step, row by row: what the prover asks beside the loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from echelon.parallel.expert import LayerLoad
from echelon.parallel.expert.router import Routed, Router, Tokens
from echelon.parallel.operations import RankOperations
from echelon.train.engine import StepResult, TrainEngine
from echelon.train.routing import RoutingSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
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
class StepRouting:
    """Say how a rank routed in one step, and what its routers know after it.

    `routes` are those of its own rows, `loads` of its layers over the whole global batch,
    `summary` of the whole model; `biases` and `shares` are those of the next step, by layer.
    """

    routes: tuple[Route, ...]
    loads: Mapping[int, LayerLoad]
    summary: RoutingSummary
    biases: Mapping[int, tuple[float, ...]]
    shares: Mapping[int, tuple[float, ...]]


class RouteNotes:
    """Listen to the routers of an engine."""

    def __init__(self, engine: TrainEngine) -> None:
        """Listen from now on."""
        self._engine = engine
        self._routes: dict[tuple[int, int], Route] = {}
        stages = engine.model.stages.values()
        found = (stage.operations for stage in stages)
        routers = {
            id(one.experts.router): one.experts.router
            for one in found
            if isinstance(one, RankOperations) and one.experts is not None
        }
        for router in routers.values():
            self._listen(router)

    def start_step(self) -> None:
        """Forget the step before."""
        self._routes.clear()

    def said(self, result: StepResult) -> StepRouting | None:
        """Return what there is to say of the step with this result; nothing of a dense model."""
        balancer = self._engine.model.balancer
        if balancer is None or result.routing is None:
            return None
        return StepRouting(
            routes=tuple(self._routes[key] for key in sorted(self._routes)),
            loads=result.loads,
            summary=result.routing,
            biases=_numbers(balancer.biases),
            shares=_numbers(balancer.shares),
        )

    def _listen(self, router: Router) -> None:
        route = router.route

        def listening(
            x_nD: torch.Tensor,
            weight_ED: nn.Parameter,
            layer: int,
            tokens: Tokens,
            *,
            train: bool,
        ) -> Routed:
            routed = route(x_nD, weight_ED, layer, tokens, train=train)
            self._note(layer, tokens, routed)
            return routed

        router.route = listening

    def _note(self, layer: int, tokens: Tokens, routed: Routed) -> None:
        """Keep a route; one that is computed again takes the place of the first."""
        microbatch = self._engine.groups.recorder.microbatch or 0
        kept_nK = routed.kept_nK
        if kept_nK is None:
            kept_nK = torch.ones_like(routed.chosen_nK, dtype=torch.bool)
        self._routes[layer, microbatch] = Route(
            layer=layer,
            microbatch=microbatch,
            tokens=tuple(tokens.number_n.tolist()),
            chosen=tuple(tuple(row) for row in routed.chosen_nK.tolist()),
            kept=tuple(tuple(row) for row in kept_nK.tolist()),
        )


def _numbers(vectors: Mapping[int, torch.Tensor]) -> dict[int, tuple[float, ...]]:
    return {layer: tuple(vector.tolist()) for layer, vector in vectors.items()}
