"""A rank's weights: all of them and once, layers that read the same input in one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.inference.operations import CacheOperations
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.layout.stage import part_of
from echelon.models.decoder import MLP, Block, GroupedQueryAttention
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.transport.recorder import Recorder
from echelon.training.inference import empty_decoder, put_off_biases, weight_shards
from tests.inference.runs import generation_plan, split_name


def held(context: RankContext, argument: Any) -> dict[str, int]:
    """Return the elements that a rank would read of each parameter, by name."""
    plan = Plan.from_json(argument["plan"])
    groups = rank_groups(plan, Recorder(context.rank, NoEvents()))
    part = part_of(plan, context.rank)
    decoder = empty_decoder(plan, part, groups, torch.float32, context.device)
    shards = weight_shards(plan, part, decoder, groups)
    assert not any(one.is_meta for one in decoder.parameters())
    put_off_biases(decoder)
    for module in decoder.modules():
        if isinstance(module, Block) and plan.mesh.tp > 1:
            assert isinstance(module.attention, GroupedQueryAttention)
            assert module.attention.o.bias is None
    return {name: sum(one.tensor.numel() for one in found) for name, found in shards.items()}


@pytest.mark.parametrize(
    ("name", "split"),
    [("learned", {"tp": 2, "pp": 2}), ("gqa", {"tp": 2}), ("experts", {"tp": 2, "ep": 2})],
    ids=split_name,
)
def test_ranks_read_every_element(name: str, split: dict[str, Any], rank_pool: RankPool) -> None:
    plan = generation_plan(name, **split)
    argument = {"plan": plan.to_json()}
    found = rank_pool.run(f"{__name__}:held", argument, plan.mesh.world_size)
    for spec in parameters(plan.model):
        whole = sum(one.get(spec.name, 0) for one in found)
        copies = plan.mesh.tp if spec.split_dim is None and spec.expert is None else 1
        ends = 2 if plan.model.tied and plan.mesh.pp > 1 and spec.name == "embedding.weight" else 1
        assert whole == spec.numel * copies * ends, spec.name


def test_layers_that_read_the_same_input_lie_in_one_tensor() -> None:
    plan = generation_plan("learned")
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    decoder = empty_decoder(plan, part_of(plan, 0), groups, torch.float32, torch.device("cpu"))
    operations = decoder.operations
    assert isinstance(operations, CacheOperations)
    block = decoder.layers["0"]
    assert isinstance(block.attention, GroupedQueryAttention)
    assert isinstance(block.mlp, MLP)
    weight, bias = operations.joined[id(block.attention.q)]
    block.attention.v.weight.data.fill_(2.0)
    assert weight[-1, 0] == 2.0
    assert weight.shape[0] == plan.model.query_dim + 2 * plan.model.kv_dim
    assert bias is not None
