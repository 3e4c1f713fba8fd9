"""Groups, first weights and shards of ranks: one model under every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.mesh import Mesh
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.cost.muon import STAGE_AXES
from echelon.launch.pool import RankPool
from echelon.models.initial import initial_values
from echelon.parallel.device_mesh import Wanted
from tests.parallel import pair_targets
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of
from tests.parallel.one_device import assemble


@pytest.mark.parametrize(
    "mesh",
    [Mesh(pp=2, dp_replicate=2, tp=2), Mesh(dp_replicate=2, dp_shard=2), Mesh(pp=4), Mesh(tp=3)],
    ids=str,
)
@pytest.mark.parametrize(
    "wanted", [Wanted(), Wanted(tied=(0, 1)), Wanted(slices=True, stage=True)], ids=str
)
def test_groups_of_processes_are_those_of_the_mesh(
    rank_pool: RankPool, mesh: Mesh, wanted: Wanted
) -> None:
    found = rank_pool.run(pair_targets.group_members, (mesh, wanted), world_size=mesh.world_size)
    for rank, members in enumerate(found):
        pipe = mesh.group(rank, Axis.PP)
        ends = tuple(pipe[place] for place in wanted.tied) if mesh.pp > 1 else ()
        assert members == {
            "world": tuple(range(mesh.world_size)),
            "data": mesh.group(rank, *LOSS_AXES),
            "shard": mesh.group(rank, *SHARD_AXES) if wanted.slices else (rank,),
            "replicate": mesh.group(rank, Axis.DP_REPLICATE) if wanted.slices else (rank,),
            "stage": mesh.group(rank, *STAGE_AXES) if wanted.stage else (rank,),
            "tensor": mesh.group(rank, Axis.TP),
            "pipe_forward": pipe,
            "pipe_backward": pipe,
            "tied": ends if rank in ends else (rank,),
        }


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(model=QWEN, dp=2, tp=2),
        plan_of(model=GPT2, pp=2, tp=2, sequence_parallel=True),
        plan_of(model=replace(NANO, heads=4, kv_heads=4, vocab=5), tp=4),
        plan_of(model=QWEN, pp=4, dtype="fp32", microbatches=4),
    ],
    ids=["dp2 x tp2", "pp2 x tp2", "tp4, a rank of padding", "pp4"],
)
def test_one_seed_gives_one_model_under_every_layout(rank_pool: RankPool, plan: Plan) -> None:
    ranks = rank_pool.run(pair_targets.first_weights, plan, world_size=plan.mesh.world_size)
    whole = assemble(plan, ranks)
    for spec in parameters(plan.model):
        expected = initial_values(plan.model, spec, plan.mathematics.seed)
        assert torch.equal(whole[spec.name], expected.to(whole[spec.name].dtype)), spec.name


def test_parameters_and_gradients_are_views_of_their_buckets(rank_pool: RankPool) -> None:
    plan = plan_of(model=GPT2, dp=3, tp=2)
    assert all(rank_pool.run(pair_targets.random_weights, plan, world_size=6))
