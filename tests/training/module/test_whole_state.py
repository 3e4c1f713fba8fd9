"""Whole tensors go out of a module and into another one, and what does not fit is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.plan import Precision, Zero
from echelon.training.module.optimizer import ModuleOptimizer
from echelon.training.module.whole_state import WholeTensors
from tests.parallel.layouts import plan_of
from tests.training.module.module_state_targets import OPTIMIZER, everything

BF16 = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")


def made(stage: int, *, seed: int, precision: Precision | None = None) -> ModuleOptimizer:
    """Return the optimizer of a module with a frozen layer, after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    changes = {} if precision is None else {"precision": precision}
    plan = plan_of(optimizer=OPTIMIZER, zero=Zero(stage=stage), **changes)  # pyright: ignore[reportArgumentType]
    model, optimizer = parallelize(model, plan)
    x = torch.ones(2, 3, dtype=model[0].weight.dtype)  # pyright: ignore[reportArgumentType]
    model(x).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", [None, BF16])
def test_every_tensor_goes_over(stage: int, precision: Precision | None) -> None:
    one = made(stage, seed=1, precision=precision)
    other = made(3 - stage, seed=2, precision=precision)
    right = everything(one)
    assert not torch.equal(everything(other)["parameters 0.weight"], right["parameters 0.weight"])
    other.load_full_state(lambda kind, name: right[f"{kind} {name}"], one.progress())
    after = everything(other)
    assert after.keys() == right.keys()
    assert "parameters 0.bias" in after
    assert ("master 0.weight" in after) == (precision is not None)
    for name, value in right.items():
        assert torch.equal(after[name], value), name


def test_what_does_not_fit_is_named() -> None:
    optimizer = made(0, seed=1)
    whole = WholeTensors(optimizer.module, optimizer.slices)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    optimizer.full_state(lambda kind, name, one: tensors.setdefault(kind, {}).update({name: one}))
    assert not whole.misfit(whole.runs(), tensors)
    lost = {kind: one for kind, one in tensors.items() if kind != "exp_avg_sq"}
    assert whole.misfit(whole.runs(), lost) == "it has no exp_avg_sq"
    tensors["exp_avg"]["1.bias"] = torch.zeros(5)
    said = whole.misfit(whole.runs(), tensors)
    assert said == "1.bias (exp_avg) is (5,), and this module's is (2,)"
