# SPDX-License-Identifier: Apache-2.0
"""Where a rank sent the tokens of a step, row by row: what the prover asks beside the loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from echelon.parallel.expert import LayerLoad
from echelon.parallel.expert.router import RoutedTokens, TokenRouting
from echelon.training.diagnosis import find_routers, listen_to
from echelon.training.engine import TrainEngine
from echelon.training.observer import RoutingSummary
from echelon.training.steps.part import StepResult


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
        """Listen from now on."""
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
