# SPDX-License-Identifier: Apache-2.0
"""What the next step takes over from how the last ones routed, as checkpoints know it.

The biases of routers and the shares of the last step's loads are no parameters: every rank of a
pipeline stage holds all of them, bit for bit the same, however experts are split. One rank of them
saves, all restore.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from echelon.core.parameters import router_bias_name
from echelon.parallel.expert import Balancer
from echelon.parallel.transport.device_mesh import RankGroups
from echelon.parallel.weights import Shard

ROUTER_BIAS, ROUTER_SHARE = "router_bias", "router_share"

ExpertState = dict[str, dict[str, list[Shard]]]
"""Shards by kind, then by canonical name."""


def router_share_name(layer: int) -> str:
    """Return the canonical name of the shares of the experts of a block in the last step."""
    return f"layers.{layer}.mlp.router.share"


def expert_state(balancer: Balancer | None, groups: RankGroups) -> ExpertState:
    """Return the state of the routers of a rank, as views; a dense model has none."""
    if balancer is None:
        return {}
    first = reports_routing(groups)
    names = {ROUTER_BIAS: router_bias_name, ROUTER_SHARE: router_share_name}
    return {
        kind: {
            names[kind](layer): [_whole(names[kind](layer), tensor, primary=first)]
            for layer, tensor in by_layer.items()
        }
        for kind, by_layer in balancer.state().items()
    }


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
