"""Layers with adapters equal the reference, and what is frozen takes no gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.choices.lora import LINEARS, Lora
from echelon.models.modules import EmptyLinear
from echelon.parallel.lora import takes_gradients
from echelon.parallel.rank_model import RankModel
from tests.parallel.layouts import NANO, plan_of
from tests.parallel.one_rank import alone

TARGETS = {"all": LINEARS, "one of three": ("k",), "the last": ("down",)}


@pytest.mark.parametrize("name", TARGETS)
def test_outputs_and_gradients_are_those_of_autograd(name: str) -> None:
    lora = Lora(rank=3, alpha=6.0, targets=TARGETS[name], rslora=True)
    model, _ = alone(plan_of(model=replace(NANO, lora=lora)))
    (stage,) = model.stages.values()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    operations = stage.operations
    block: Any = stage.layers["1"]
    layers: tuple[list[EmptyLinear], ...] = (
        [block.attention.q, block.attention.k, block.attention.v],
        [block.mlp.down],
    )
    for linears in layers:
        model.store.start_step()
        model.store.start_backward(last=False)
        width = linears[0].in_features
        x = torch.randn(5, width, generator=generator, dtype=torch.float64, requires_grad=True)
        rows = [x, x.detach().clone().requires_grad_()]
        if len(linears) > 1:
            found = operations.project_in(rows[0], linears)
        else:
            found = operations.project_out(rows[0], linears[0])
        right = torch.cat([one(rows[1]) for one in linears], dim=-1)
        torch.testing.assert_close(found, right)
        dy = torch.randn(right.shape, generator=generator, dtype=torch.float64)
        found.backward(dy)
        right.backward(dy)
        torch.testing.assert_close(rows[0].grad, rows[1].grad)
        for linear in linears:
            _compare(model, linear)


def _compare(model: RankModel, linear: EmptyLinear) -> None:
    slots = {id(slot.parameter): slot for bucket in model.buckets for slot in bucket.slots}
    assert slots[id(linear.weight)].gradient.numel() == 0
    for one in (linear.lora_a, linear.lora_b) if linear.lora is not None else ():
        assert one.weight.grad is not None
        torch.testing.assert_close(slots[id(one.weight)].gradient, one.weight.grad)
        assert float(one.weight.grad.abs().max()) > 0


def test_a_frozen_layer_without_an_adapter_learns_nothing() -> None:
    lora = Lora(rank=3, alpha=6.0, targets=("q",))
    model, _ = alone(plan_of(model=replace(NANO, lora=lora)))
    (stage,) = model.stages.values()
    block: Any = stage.layers["0"]
    assert takes_gradients([block.attention.q, block.attention.k], model.store)
    assert not takes_gradients([block.mlp.down], model.store)
