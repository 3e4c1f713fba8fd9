"""Wrappers are taken off names, models and optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from echelon.core.errors import ConfigError
from echelon.proof.evidence.captured import LogicalParameters
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.placement.names import NameTable
from echelon.proof.verify.placement.program import open_program, plain_name, torch_optimizer

TABLE = NameTable(
    logical=LogicalParameters(shapes={}, aliases={}), mesh=NamedMesh({"dp": 1}), rank=0
)


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Wrapper:
    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def test_names_lose_the_wrappers_on_their_way_and_nothing_else() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))
    model = DistributedDataParallel(nn.ModuleDict({"module": inner}))
    names = [plain_name(model, name) for name, _ in model.named_parameters()]
    assert names == ["module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"]


def test_modules_of_one_device_are_found_behind_wrappers() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)), nn.GELU())
    program = open_program(OnRank(model=DistributedDataParallel(inner), step=str), TABLE)
    found = program.logical_modules({"0", "1", "3"})
    assert [(name, module) for name, module in found] == [("0", inner[0]), ("1", inner[1])]


def test_the_optimizer_of_torch_is_found_inside() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert torch_optimizer(Wrapper(Wrapper(optimizer))) is optimizer
    assert torch_optimizer(Wrapper(None)) is None


def test_a_program_has_models_or_one_and_as_many_offsets() -> None:
    model = nn.Linear(2, 2)
    program = open_program(OnRank(models=[model, nn.Linear(1, 1)], step=str), TABLE)
    assert [one.name for one in program.parameters()] == ["weight", "bias"] * 2
    tied = open_program(OnRank(models=[model, model], step=str), TABLE)
    assert len(list(tied.parameters())) == 2
    with pytest.raises(ConfigError, match="layer_offsets"):
        open_program(OnRank(model=model, step=str, layer_offsets=(0, 2)), TABLE)
    with pytest.raises(ConfigError, match="verify-returned"):
        open_program(OnRank(model="no module", step=str), TABLE)
