"""The groups of ranks are those of the mesh and the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan, Zero
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.layout.muon import STAGE_AXES
from echelon.parallel.device_mesh import joined_group
from tests.parallel.expert import targets as expert_targets
from tests.parallel.expert.targets import mixture_plan
from tests.parallel.layouts import ADAMW, NANO, plan_of
from tests.parallel.tensor import pair_targets

TIED = replace(NANO, layers=4, tied=True)
MUON = replace(ADAMW, kind="muon")


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(model=TIED, pp=2, dp=2, tp=2),
        plan_of(pp=4, model=replace(NANO, layers=4)),
        plan_of(model=TIED, pp=2, zero=Zero(stage=1)),
        plan_of(dp=2, dp_shard=2, zero=Zero(stage=1), optimizer=MUON),
        plan_of(tp=3),
    ],
    ids=lambda plan: f"{plan.mesh}",
)
def test_groups_of_processes_are_those_of_the_mesh(rank_pool: RankPool, plan: Plan) -> None:
    mesh, slices = plan.mesh, plan.layout.zero.stage > 0
    stages = plan.mathematics.optimizer.kind == "muon"
    found = rank_pool.run(pair_targets.group_members, plan, world_size=mesh.world_size)
    for rank, members in enumerate(found):
        pipe = mesh.group(rank, Axis.PP)
        ends = (pipe[0], pipe[-1]) if plan.model.tied and mesh.pp > 1 else ()
        assert members == {
            "world": tuple(range(mesh.world_size)),
            "data": mesh.group(rank, *LOSS_AXES),
            "shard": mesh.group(rank, *SHARD_AXES) if slices else (rank,),
            "replicate": mesh.group(rank, Axis.DP_REPLICATE) if slices else (rank,),
            "stage": mesh.group(rank, *STAGE_AXES) if stages else (rank,),
            "tensor": mesh.group(rank, Axis.TP),
            "pipe_forward": pipe,
            "pipe_backward": pipe,
            "tied": ends if rank in ends else (rank,),
        }


NODES = 2
TWO_HOP = ExpertLayout(dispatch="two-hop")


@pytest.mark.parametrize(
    ("chosen", "across", "within"),
    [
        ({"dp_shard": 4, "ep": 4}, [(0, 2), (1, 3)], [(0, 1), (2, 3)]),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, [(0, 2), (1, 3)], [(0, 1), (2, 3)]),
        (
            {"dp_shard": 4, "tp": 2, "ep": 4, "layout": replace(TWO_HOP, expert_tp=2)},
            [(0, 4), (1, 5), (2, 6), (3, 7)],
            [(0, 2), (1, 3), (4, 6), (5, 7)],
        ),
    ],
)
def test_hops_join_the_same_places_of_nodes_and_the_ranks_of_a_node(
    chosen: dict[str, Any],
    across: list[tuple[int, ...]],
    within: list[tuple[int, ...]],
    rank_pool: RankPool,
) -> None:
    plan = mixture_plan(nodes=NODES, **{"layout": TWO_HOP, **chosen})
    found = rank_pool.run(expert_targets.hop_ranks, plan, world_size=plan.mesh.world_size)
    assert sorted({one for one, _ in found}) == across
    assert sorted({other for _, other in found}) == within
    assert all(rank in one and rank in other for rank, (one, other) in enumerate(found))


def join_twice(context: RankContext, _: None) -> tuple[bool, tuple[int, ...], int]:
    """Return what two groups over all ranks have in common."""
    first, second = joined_group(None), joined_group(None)
    return first.communicator is second.communicator, first.ranks, second.index


def test_a_process_group_has_one_communicator(rank_pool: RankPool) -> None:
    found = rank_pool.run(join_twice, None, world_size=2)
    assert found == [(True, (0, 1), rank) for rank in range(2)]
