# SPDX-License-Identifier: Apache-2.0
"""The balance of experts as a part of each step: loads of all ranks, biases and shares after it.

The biases of routers and the shares of the last step's loads are no parameters: every rank of a
pipeline stage holds all of them, bit for bit the same, however experts are split. One rank of them
saves, all restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from echelon.core.parameters import router_bias_name
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.expert import Balancer, LayerLoad
from echelon.parallel.storage.weights import Shard
from echelon.training.observer import RoutingSummary
from echelon.training.steps.part import (
    NamedShards,
    ShardsByKind,
    StepPart,
    StepPlace,
    StepResult,
)

ROUTER_BIAS, ROUTER_SHARE = "router_bias", "router_share"


def router_share_name(layer: int) -> str:
    """Return the canonical name of the shares of the experts of a block in the last step."""
    return f"layers.{layer}.mlp.router.share"


class ExpertBalance(StepPart):
    """Count the loads of a step over all ranks, and move biases and shares by them."""

    num_told = 5

    def __init__(self, balancer: Balancer, groups: RankGroups) -> None:
        self.balancer, self._groups = balancer, groups
        self._loads: Mapping[int, LayerLoad] = {}

    def running(self, loss_scale: float) -> AbstractContextManager[None]:
        """Forget the loads of the last step."""
        self.balancer.start_step(loss_scale)
        return super().running(loss_scale)

    def gradients_complete(self) -> Sequence[float]:
        """Add up the loads of all ranks; tell the sums of this one's layers."""
        self._loads = self.balancer.finish()
        return routing_row(self._loads, reports=reports_routing(self._groups))

    def agreed(self, result: StepResult, rows: torch.Tensor) -> StepResult:
        """Result with the loads here and their summary over all layers."""
        return replace(result, routing=RoutingSummary.from_rows(rows), loads=self._loads)

    def end_step(self, result: StepResult) -> StepResult:
        """Move biases and shares, unless the step is skipped."""
        if not result.skipped:
            self.balancer.update()
        return result

    def facts(self, result: StepResult) -> StepResult:
        """Loads, on one rank of each stage alone: all ranks of a stage hold the same."""
        return result if tells_routing(self._groups) else replace(result, loads={})

    def tensors(self) -> ShardsByKind:
        """Biases of routers and last shares of experts, as views.

        Every rank of a stage holds all of its layers. Biases that a file of weights lacks begin at
        zero.
        """
        first = reports_routing(self._groups)
        names = {ROUTER_BIAS: router_bias_name, ROUTER_SHARE: router_share_name}
        return {
            kind: {
                names[kind](layer): [_whole(names[kind](layer), tensor, primary=first)]
                for layer, tensor in by_layer.items()
            }
            for kind, by_layer in self.balancer.state().items()
        }

    def shared_state(self, held: NamedShards) -> NamedShards:
        """State that is held, with biases and shares."""
        for shards in self.tensors().values():
            held = {**held, **shards}
        return held


def expert_balance(place: StepPlace) -> ExpertBalance | None:
    """The part of a rank; None in a dense model."""
    balancer = place.model.balancer
    return None if balancer is None else ExpertBalance(balancer, place.groups)


def routing_row(loads: Mapping[int, LayerLoad], *, reports: bool) -> list[float]:
    """Numbers that a rank adds to the summary: zeros, unless it `reports` for its stage."""
    if not reports:
        return [0.0] * 5
    layers = loads.values()
    return [
        float(sum(sum(load.counts) for load in layers)),
        float(sum(load.dropped for load in layers)),
        sum(load.aux_loss for load in layers),
        sum(load.z_loss for load in layers),
        max((load.imbalance for load in layers), default=0.0),
    ]


def reports_routing(groups: RankGroups) -> bool:
    """Return whether this rank is the one of its stage that tells how its layers routed."""
    return groups.stage.index == 0 and groups.mirror.index == 0


def tells_routing(groups: RankGroups) -> bool:
    """Return whether it is the one of all islands of local SGD that tells it to an observer."""
    return reports_routing(groups) and groups.islands.index == 0


def whole_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Shard]]:
    """Return the shards of whole tensors on one device, by canonical name."""
    return {name: [_whole(name, tensor, primary=True)] for name, tensor in tensors.items()}


def _whole(name: str, tensor: torch.Tensor, *, primary: bool) -> Shard:
    return Shard(
        name=name,
        global_shape=tuple(tensor.shape),
        offset=(0,) * tensor.dim(),
        tensor=tensor,
        primary=primary,
    )
