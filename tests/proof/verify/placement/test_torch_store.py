"""DTensors are read from their placements: tensor-parallel plans, FSDP2, both together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.evidence.captured import LogicalParameters
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.placement.names import NameTable
from echelon.proof.verify.placement.program import open_program
from echelon.proof.verify.placement.torch_store import TorchStore, placed_elements


def test_a_tensor_in_the_place_of_a_parameter_is_read() -> None:
    model = nn.Linear(2, 3, bias=False)
    optimizer, weight = torch.optim.SGD(model.parameters()), model.weight
    table = NameTable(
        logical=LogicalParameters(shapes={"weight": (3, 2)}, aliases={}),
        mesh=NamedMesh({"dp": 1}),
        rank=0,
    )
    on_rank = OnRank(model=model, optimizer=optimizer, step=str)
    store = TorchStore(open_program(on_rank, table))
    weight.grad = torch.ones(3, 2)
    assert list(store.stand_ins()) == []
    # What was made of another leaf, as frameworks do that flatten weights, is that leaf's.
    leaf = nn.Parameter(weight.detach().reshape(-1))
    del model.weight
    model.weight = leaf.view(3, 2)
    assert list(store.stand_ins()) == []
    leaf.grad = torch.arange(6.0)
    (found,) = store.stand_ins()
    assert (found.name, found.values.tolist()) == ("weight", [0, 1, 2, 3, 4, 5])
    # Of a sum of two it is neither's.
    model.weight = leaf.view(3, 2) + weight
    assert list(store.stand_ins()) == []


def places(context: RankContext, sizes: tuple[int, int]) -> tuple[list[int], list[float]]:
    """Return where a rank's part of a weight [rows, 3] lies by its placements, and what it holds.

    The weight is 0, 1, 2, ...: what lies at a place is its number.
    """
    rows, tp = sizes
    linear = nn.Linear(3, rows, bias=False)
    model = nn.Sequential(linear)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(rows * 3.0).reshape(rows, 3))
    mesh = init_device_mesh("cpu", (context.world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    elements = placed_elements(torch.arange(rows * 3).reshape(rows, 3), weight)
    return elements.reshape(-1).tolist(), weight.to_local().reshape(-1).tolist()


@pytest.mark.parametrize(
    ("rows", "tp", "ranks"), [(4, 1, 2), (5, 1, 2), (3, 1, 4), (8, 2, 4), (4, 2, 2)]
)
def test_fsdp_and_tensor_parallel_placements(
    rows: int, tp: int, ranks: int, rank_pool: RankPool
) -> None:
    found = rank_pool.run(places, (rows, tp), ranks)
    assert [place for place, _ in found] == [[int(v) for v in held] for _, held in found]
    assert sorted(n for place, _ in found for n in place) == list(range(rows * 3))
