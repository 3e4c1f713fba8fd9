"""Plans on small nodes whose ranks keep secondary slices, and what ranks run of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan, Zero
from echelon.launch.context import RankContext
from echelon.parallel.transport import collectives
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.messages import GlooPeers, PendingWorks, start_all_gather
from tests.parallel.targets import train
from tests.proof.layouts import layout

SECONDARY = Zero(stage=3, accumulate="slices", secondary=True)


def on_nodes(plan: Plan, each: int) -> Plan:
    """Return a plan on nodes of `each` devices."""
    nodes = -(-plan.mesh.world_size // each)
    return replace(plan, cluster=replace(plan.cluster, devices_per_node=each, nodes=nodes))


def node_layout(*, each: int, **chosen: Any) -> Plan:
    """Return a plan of the prover's tests at stage 3 on nodes, with secondary slices."""
    zero = {"stage": 3, "secondary": True, **chosen.pop("zero", {})}
    return on_nodes(layout(zero=zero, **chosen), each)


def without_secondary(plan: Plan) -> Plan:
    """Return the plan in which every gather goes over all ranks."""
    zero = replace(plan.layout.zero, secondary=False)
    return replace(plan, layout=replace(plan.layout, zero=zero))


def gathers_by_tier(context: RankContext, plan: Plan) -> tuple[int, int]:
    """Train two steps; return the bytes of the second's gathers that messages took to this node,
    and to others."""
    node = plan.cluster.devices_per_node
    sent = [0, 0]

    named, gather = "", Group.all_gather

    def noted(
        self: Group, whole: torch.Tensor, shard: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        nonlocal named
        named = name
        return gather(self, whole, shard, name=name, async_op=async_op)

    def counted(whole: torch.Tensor, shard: torch.Tensor, peers: GlooPeers) -> PendingWorks:
        for place in peers.others() if named.startswith("parameters.") else ():
            away = peers.ranks[place] // node != context.rank // node
            sent[away] += shard.nbytes
        return start_all_gather(whole, shard, peers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_gather", noted)
        patch.setattr(collectives, "start_all_gather", counted)
        train(context, (plan, 1))
        first = tuple(sent)
        sent[:] = 0, 0
        train(context, (plan, 2))
    return sent[0] - first[0], sent[1] - first[1]
