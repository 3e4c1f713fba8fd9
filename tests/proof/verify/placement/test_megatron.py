"""Megatron-core: parameters say themselves how they are split; proven where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.proof.evidence.captured import LogicalParameters
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.placement.megatron import MegatronStore, is_megatron
from echelon.proof.verify.placement.names import NameTable
from echelon.proof.verify.placement.program import Program, open_program
from tests.proof.verify.planted_programs import fresh_proof_of

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="no megatron: bench/setup_peers.sh"
)
SHAPES = {
    "layers.2.mlp.linear_fc1.weight": (8, 2),
    "layers.2.mlp.norm.weight": (2,),
    "layers.2.mlp.local_experts.3.weight": (2, 2),
}


class Mlp(nn.Module):
    """The second half of a gated layer that is the third of the model."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=True)
        self.linear_fc1 = nn.Linear(2, rows, bias=False)
        self.norm = nn.RMSNorm(2)
        self.local_experts = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
        weight: Any = self.linear_fc1.weight
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1


class Layer(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layer_number = 3
        self.mlp = Mlp(rows)


def program(rows: int) -> Program:
    experts = {f"layers.2.mlp.local_experts.{n}.weight": (2, 2) for n in range(4)}
    table = NameTable(
        logical=LogicalParameters(shapes=SHAPES | experts, aliases={}),
        mesh=NamedMesh({"ep": 2, "tp": 2}),
        rank=3,
    )
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(rows)])})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return open_program(OnRank(model=model, step=str, optimizer=optimizer), table)


def test_layers_know_their_number_gates_are_halves_and_experts_count_over_ranks() -> None:
    assert is_megatron(program(4))
    found = {
        held.place.names[0]: held.place.index.tolist() for held in MegatronStore(program(4)).held
    }
    # The second half of the gate, then the second half of up: rows 2, 3 and 6, 7.
    assert found["layers.2.mlp.linear_fc1.weight"] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert found["layers.2.mlp.norm.weight"] == [0, 1]
    assert {name for name in found if "experts" in name} == {
        "layers.2.mlp.local_experts.2.weight",
        "layers.2.mlp.local_experts.3.weight",
    }


def test_a_shape_that_does_not_fit_is_told() -> None:
    with pytest.raises(ConfigError, match=r"verify-names.*linear_fc1.weight has shape \[3, 2\]"):
        MegatronStore(program(3))


@needs_megatron
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"SHARED_STATE, SEQUENCE": "SEQUENCE, SHARED_STATE", "= False, False,": "= True, False,"},
        {'{"dp": 1, "tp": 2}': '{"dp": 2, "tp": 1}', "= False, False,": "= True, False,"},
    ],
)
def test_tensor_ranks_and_the_distributed_optimizer_are_proven(
    changes: dict[str, str], tmp_path: Path
) -> None:
    proof = fresh_proof_of(tmp_path, "megatron_tp", changes)
    assert proof.proven, proof.diagnosis
    assert proof.framework == "Megatron"


@needs_megatron
def test_another_decay_of_norms_is_named(tmp_path: Path) -> None:
    changes = {"eps=1e-8, weight_decay=0.1": "eps=1e-8, weight_decay=0.0"}
    told = fresh_proof_of(tmp_path, "megatron_tp", changes).diagnosis
    assert told is not None
    assert (told.rule, told.factor) == ("prove-clipped-update", "weight decay")
