"""The state of routers is whole on every rank, one of a stage saves it; rows of loads add up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.expert import Balancer, LayerLoad
from echelon.parallel.transport.recorder import Recorder
from echelon.training.steps.expert_balance import (
    ROUTER_BIAS,
    ROUTER_SHARE,
    ExpertBalance,
    expert_balance,
    reports_routing,
    routing_row,
    whole_shards,
)
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of


def places(stage: int, mirror: int) -> RankGroups:
    """Return the groups of a rank at these places, as far as they are asked."""
    return cast(
        "RankGroups",
        SimpleNamespace(stage=SimpleNamespace(index=stage), mirror=SimpleNamespace(index=mirror)),
    )


def balancer(model: Any, *layers: int) -> Balancer:
    plan = plan_of(model=model)
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    return Balancer(plan, groups, layers, torch.device("cpu"))


@pytest.mark.parametrize(("stage", "mirror"), [(0, 0), (1, 0), (0, 1)])
def test_one_rank_of_a_stage_and_its_mirror_is_the_primary_one(stage: int, mirror: int) -> None:
    primary = stage == mirror == 0
    assert reports_routing(places(stage, mirror)) is primary
    state = ExpertBalance(balancer(DEEPSEEK, 1, 3), places(stage, mirror)).tensors()
    shards = [shard for kind in state.values() for held in kind.values() for shard in held]
    assert len(shards) == 4
    for shard in shards:
        assert (shard.global_shape, shard.offset, shard.primary) == ((8,), (0,), primary)


def test_what_is_loaded_into_the_shards_is_what_the_next_step_takes() -> None:
    one = balancer(DEEPSEEK, 1, 3)
    state = ExpertBalance(one, places(0, 0)).tensors()
    assert list(state[ROUTER_SHARE]) == ["layers.1.mlp.router.share", "layers.3.mlp.router.share"]
    (share,) = state[ROUTER_SHARE]["layers.3.mlp.router.share"]
    assert share.tensor.tolist() == [1 / 8] * 8
    share.tensor.copy_(torch.arange(8))
    (bias,) = [shards for name, shards in state[ROUTER_BIAS].items() if name.startswith("layers.1")]
    bias[0].tensor.fill_(0.5)
    assert one.shares[3].tolist() == list(range(8))
    assert one.biases[1].tolist() == [0.5] * 8
    assert not one.biases[3].any()


def test_a_model_without_biases_or_experts_has_none() -> None:
    assert ROUTER_BIAS not in ExpertBalance(balancer(MIXTRAL, 0), places(0, 0)).tensors()
    dense: Any = SimpleNamespace(model=SimpleNamespace(balancer=None))
    assert expert_balance(dense) is None


def test_whole_tensors_on_one_device_are_primary() -> None:
    tensor = torch.zeros(2, 3)
    (shard,) = whole_shards({"w": tensor})["w"]
    assert (shard.name, shard.global_shape, shard.offset) == ("w", (2, 3), (0, 0))
    assert shard.primary
    assert shard.tensor is tensor


def load(counts: tuple[int, ...], dropped: int) -> LayerLoad:
    return LayerLoad(counts=counts, dropped=dropped, aux_loss=0.5, z_loss=0.25)


def test_a_row_sums_the_layers_and_keeps_the_worst_imbalance() -> None:
    loads = {0: load((2, 2), 1), 1: load((4, 0), 0)}
    assert routing_row(loads, reports=True) == [8.0, 1.0, 1.0, 0.5, 2.0]


def test_a_rank_whose_stage_another_tells_of_adds_nothing() -> None:
    assert routing_row({0: load((2, 2), 1)}, reports=False) == [0.0] * 5
    assert routing_row({}, reports=True) == [0.0] * 5
