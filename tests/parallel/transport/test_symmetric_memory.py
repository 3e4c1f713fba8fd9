"""Fused products: the operators that PyTorch has, what they lack here, and what they mean."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from echelon.core.errors import EnvironmentProblem
from echelon.cost.bytes.terms import all_gather_bytes, reduce_scatter_bytes
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport.symmetric_memory import (
    OPERATORS,
    missing_of_symmetric_memory,
    require_symmetric_memory,
)
from tests.parallel.tensor_overlap.overlap_targets import fused_products

SCHEMAS = (
    "symm_mem::fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A=True) -> (Tensor?, Tensor[])",
    "symm_mem::fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
)
"""Those of PyTorch 2.11 and 2.13."""


@pytest.mark.parametrize(("name", "schema"), list(zip(OPERATORS, SCHEMAS, strict=True)))
def test_the_operators_are_called_as_this_torch_declares_them(name: str, schema: str) -> None:
    import_module("torch.distributed._symmetric_memory")
    assert str(getattr(torch.ops.symm_mem, name).default._schema) == schema


def test_a_device_without_them_is_told_before_the_model_is_built() -> None:
    assert "computes on cpu" in missing_of_symmetric_memory(torch.device("cpu"))
    with pytest.raises(EnvironmentProblem, match="computes on cpu") as found:
        require_symmetric_memory(torch.device("cpu"))
    assert found.value.rules == ("symmetric-memory-available",)
    (problem,) = found.value.problems
    assert problem.suggestions == ('mesh.tp_overlap = "ring"',)


def test_gpus_that_cannot_read_one_another_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: False)
    device = torch.device("cuda", 1)
    assert missing_of_symmetric_memory(device) == (
        "GPU 1 can read the memory of no other GPU that it sees"
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    assert missing_of_symmetric_memory(device) == ""


def test_a_torch_without_an_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Few:
        fused_all_gather_matmul = None

    monkeypatch.setattr(torch.ops, "symm_mem", Few())
    missing = missing_of_symmetric_memory(torch.device("cuda", 0))
    assert missing.endswith("has no symm_mem::fused_matmul_reduce_scatter")


def test_rows_are_gathered_multiplied_and_summed(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(fused_products, None, world_size=3)
    rows = torch.cat([torch.full((2, 3), r + 1.0, dtype=torch.float64) for r in range(3)])
    whole = torch.arange(18.0, dtype=torch.float64).view(6, 3) * (1 + 2 + 3)
    for index, rank in enumerate(ranks):
        weight = rank["weight"]
        assert torch.equal(rank["gathered"], rows)
        assert torch.equal(rank["product"], rows @ weight)
        assert torch.equal(rank["alone"], rows @ weight)
        assert rank["nothing"] is None
        assert torch.equal(rank["summed"], (whole @ weight)[2 * index : 2 * index + 2])
        assert [(one.kind, one.name, one.axis, one.bytes) for one in rank["events"]] == [
            ("all_gather", "gather", "tp", all_gather_bytes(2 * 3 * 8, 3)),
            ("all_gather", "again", "tp", all_gather_bytes(2 * 3 * 8, 3)),
            ("reduce_scatter", "scatter", "tp", reduce_scatter_bytes(2 * 4 * 8, 3)),
        ]
