"""What a store reads of a module that Echelon has split, and where a tensor rank has it."""

from __future__ import annotations

import pytest
import torch

from echelon.core.plan import Zero, ZeroStage
from echelon.layout.modules import TensorPiece
from echelon.parallel.module.tensor.layers import cut_values, join_values
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.placement.echelon import EchelonStore, cut_elements
from echelon.proof.verify.placement.names import NameTable
from echelon.proof.verify.placement.program import open_program
from echelon.proof.verify.placement.registry import open_store
from echelon.proof.verify.reference import logical_parameters
from tests.parallel.layouts import plan_of
from tests.parallel.module.models import make
from tests.parallel.module.refusals import backward, parallel


@pytest.mark.parametrize("stage", [0, 3])
def test_everything_is_read_once(stage: ZeroStage) -> None:
    model, optimizer = parallel(plan_of(zero=Zero(stage=stage)))
    right = make("transformer")
    logical = logical_parameters(right)
    table = NameTable(logical=logical, mesh=NamedMesh({"dp": 1}), rank=0, names={})
    program = OnRank(model=model, optimizer=optimizer, step=lambda number: None)
    store = open_store(open_program(program, table))
    assert isinstance(store, EchelonStore)
    assert getattr(store, "framework", "") == "Echelon"
    held = {one.name: one.values for one in store.parameters()}
    for name, value in right.named_parameters():
        assert torch.equal(held[name], value.detach().reshape(-1)), name
    gradients: dict[str, torch.Tensor] = {}
    handles = store.on_update(
        lambda one: gradients.update({g.name: g.values.clone() for g in store.gradients(one)})
    )
    backward(model)
    backward(right)
    optimizer.step()
    for handle in handles:
        handle.remove()
    for name, value in right.named_parameters():
        if value.grad is not None:
            torch.testing.assert_close(gradients[name], value.grad.reshape(-1), msg=name)
    state = {(kind, one.name) for kind, one in store.state()}
    assert {("exp_avg", name) for name in gradients} <= state
    assert {one.name for one in store.leaves()} == set(gradients)


@pytest.mark.parametrize(("parts", "dim"), [((7,), 0), ((4, 2, 2), 1)])
def test_elements_lie_where_values_do(parts: tuple[int, ...], dim: int) -> None:
    shape = (7, 3) if dim == 0 else (3, 8)
    piece = TensorPiece(name="w", shape=shape, dim=dim, parts=parts)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    ranks = [cut_values(piece, whole + 1, 2, index) for index in (0, 1)]
    for index, values in enumerate(ranks):
        assert torch.equal(cut_elements(whole, piece, 2, index), values - 1)  # padding is -1
    assert torch.equal(join_values(piece, ranks), whole + 1)
