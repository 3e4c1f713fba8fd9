"""Weight gradients of linear layers come when W runs, and are those of autograd."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Zero
from echelon.layout.modules import ROOT, ModuleParameter, plan_module_buckets
from echelon.parallel.module.forwards.linear import defer_weights
from echelon.parallel.module.pipeline.passes import StageGradientStore
from echelon.parallel.storage.buckets import BucketRule, make_buckets
from echelon.parallel.storage.gradients import Reduction
from tests.parallel.module.pipeline.targets import plan


class Own(nn.Linear):
    """A layer of a class of one's own: its backward is its own business."""


def store_for(model: nn.Module) -> StageGradientStore:
    """Return a store for all parameters of a module, on one rank."""
    named = dict(model.named_parameters())
    one = plan(pp=1, zero=Zero())
    held = [
        ModuleParameter(
            spec=ParameterSpec(name=name, shape=tuple(p.shape), layer=None),
            users=(ROOT,),
            trained=True,
        )
        for name, p in named.items()
    ]
    plans = plan_module_buckets(one, held, [ROOT]).trained
    rule = BucketRule(
        plans=plans,
        optimizer=one.mathematics.optimizer,
        counted=dict.fromkeys(named, True),
        uses={},
        gradients=torch.float64,
    )
    like = torch.empty(0, dtype=torch.float64)
    store = StageGradientStore(Reduction())
    store.hold(make_buckets(named, [m.spec for m in held], rule, like))
    store.start_step()
    return store


def layer(kind: str) -> nn.Module:
    """Return a layer with five inputs and three outputs."""
    torch.manual_seed(1)
    if kind == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        return Conv1D(3, 5).double()
    return nn.Linear(5, 3, bias=kind == "biased").double()


@pytest.mark.parametrize("kind", ["biased", "plain", "Conv1D"])
def test_gradients_are_those_of_autograd_and_come_with_w(kind: str) -> None:
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    other = layer(kind)
    other(x).square().sum().backward()
    expected, x.grad = x.grad, None
    model = layer(kind)
    store = store_for(model)
    slots = {s.spec.name: s for bucket in store.buckets for s in bucket.slots}
    assert defer_weights([model], store) == [model]
    store.start_backward(0, last=True)
    out = model(x)
    assert torch.equal(out, other(x))
    with store.collects() as work:
        out.square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-13)
    assert all(not slot.gradient.any() for slot in slots.values()), "before W there is none"
    store.run_collected(work)
    for name, one in other.named_parameters():
        torch.testing.assert_close(slots[name].gradient, one.grad, rtol=0, atol=1e-13)
        assert dict(model.named_parameters())[name].grad is None


def test_what_is_left_to_autograd() -> None:
    frozen = nn.Linear(5, 3).requires_grad_(False)
    plain = nn.Linear(5, 3)
    model = nn.Sequential(Own(5, 5), plain, nn.LayerNorm(3)).double()
    store = store_for(model)
    assert defer_weights([*model, frozen], store) == [plain]
    assert defer_weights([plain], store) == []


def test_an_input_by_name_and_weights_put_into_a_call_are_left_to_autograd() -> None:
    model = nn.Linear(5, 3).double()
    store = store_for(model)
    defer_weights([model], store)
    x = torch.randn(2, 5, dtype=torch.float64)
    expected = model(x)
    assert torch.equal(model(input=x), expected)
    others = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    torch.func.functional_call(model, others, (x,)).sum().backward()
    assert all(one.grad is not None for one in others.values())
    assert not store.came


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_layer_is_a_plain_one(twin: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Linear(5, 3).double()
    store = store_for(model)
    defer_weights([model], store)
    x = torch.randn(2, 5, dtype=torch.float64)
    other = twin(model)
    assert torch.equal(other(x), model(x))
    other(x).sum().backward()
    assert all(one.grad is not None for one in other.parameters())
    assert not store.came


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_torch_func_sees_a_layer_of_the_class() -> None:
    model = nn.Linear(5, 3).double()
    defer_weights([model], store := store_for(model))
    x = torch.randn(2, 5, dtype=torch.float64)
    y, slope, *_ = torch.func.jvp(model, (x,), (x,))
    assert torch.equal(y, nn.functional.linear(x, model.weight, model.bias))
    torch.testing.assert_close(slope, nn.functional.linear(x, model.weight))
    assert not store.came
