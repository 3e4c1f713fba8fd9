"""Weight gradients go into buckets at once, and what autograd promises of them still holds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from echelon.api.parallelizing import parallelize
from echelon.parallel.storage.buckets import Slot
from echelon.parallel.storage.gradients import GradientStore
from echelon.training.module.optimizer import ModuleOptimizer
from tests.parallel.layouts import plan_of

X = torch.linspace(-1, 1, 2 * 3 * 5, dtype=torch.float64).reshape(2, 3, 5)


class Net(nn.Module):
    """Layers that are used once, and twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.twice = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.head(self.twice(self.twice(h).tanh()))


def split() -> tuple[Net, Net, ModuleOptimizer]:
    """Return a module, the same one on one rank of a plan, and its optimizer."""
    torch.manual_seed(0)
    whole = Net().double()
    model, optimizer = parallelize(copy.deepcopy(whole), plan_of())
    return whole, model, optimizer


def slots(optimizer: ModuleOptimizer) -> dict[str, Slot]:
    """Return where each gradient is."""
    return {slot.spec.name: slot for one in optimizer.module.buckets for slot in one.slots}


def assert_gradients(optimizer: ModuleOptimizer, whole: nn.Module, times: float = 1.0) -> None:
    """Compare what is in the buckets with the gradients of a whole module."""
    found = slots(optimizer)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name].gradient, parameter.grad * times)


def test_what_is_used_once_is_written_and_the_rest_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, model, optimizer = split()
    added: list[str] = []
    names = {id(one): name for name, one in model.named_parameters()}
    add = GradientStore.add

    def noted(self: GradientStore, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        added.append(names[id(parameter)])
        add(self, parameter, gradient)

    monkeypatch.setattr(GradientStore, "add", noted)
    for net in (whole, model):
        net(X).square().sum().backward()
    assert sorted(added) == ["first.bias", "head.bias", "twice.weight"]
    assert_gradients(optimizer, whole)


def test_a_second_backward_is_added_to_the_first() -> None:
    whole, model, optimizer = split()
    whole(X).square().sum().backward()
    with optimizer.no_sync():
        model(X).square().sum().backward()
    model(X).square().sum().backward()
    assert_gradients(optimizer, whole, times=2.0)


def test_a_gradient_that_somebody_else_asked_for_is_theirs() -> None:
    whole, model, optimizer = split()
    (mine,) = torch.autograd.grad(model(X).square().sum(), [model.head.weight])
    (input_only,) = torch.autograd.grad(model(x := X.clone().requires_grad_()).sum(), [x])
    kept = mine.clone()
    for net in (whole, model):
        net(3 * X).square().sum().backward()
    assert_gradients(optimizer, whole)
    assert torch.equal(mine, kept)
    assert input_only.shape == X.shape


def test_a_penalty_on_gradients_has_a_gradient() -> None:
    whole, model, optimizer = split()
    for net in (whole, model):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().sum(), [x], create_graph=True)
        (net(x).square().sum() + slope.square().sum()).backward()
    assert_gradients(optimizer, whole)


def test_a_hook_of_a_parameter_sees_its_gradient_and_may_change_it() -> None:
    whole, model, optimizer = split()
    for net in (whole, model):
        net.head.weight.register_hook(lambda gradient: 2 * gradient)
        net(X).square().sum().backward()
    assert_gradients(optimizer, whole)


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_layer_is_a_plain_one(twin: Callable[[nn.Module], nn.Module]) -> None:
    _, model, optimizer = split()
    other = twin(model.first)
    assert torch.equal(other(X), model.first(X))
    other(X).sum().backward()
    assert all(one.grad is not None for one in other.parameters())
    assert optimizer.module.passes.num_passes == 0


def test_weights_put_into_a_call_begin_no_backward() -> None:
    whole, model, optimizer = split()
    others = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    torch.func.functional_call(model, others, (X,)).square().sum().backward()
    passes = optimizer.module.passes
    assert not passes.running
    assert (passes.reduced, passes.num_passes) == (False, 0)
    for net in (whole, model):
        net(X).square().sum().backward()
    assert_gradients(optimizer, whole)
    for name, one in whole.named_parameters():
        torch.testing.assert_close(others[name].grad, one.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_torch_func_and_forward_derivatives_are_those_of_the_module() -> None:
    whole, model, _ = split()

    def slopes(net: nn.Module) -> list[torch.Tensor | None]:
        weights = {name: one.detach() for name, one in net.named_parameters()}

        def loss(given: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(net, given, (x,)).square().sum()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X)
        pushed = torch.func.jvp(net, (X,), (X.flip(0),))
        with forward_ad.dual_level():
            y = net(forward_ad.make_dual(X, X.flip(0)))
            return [*each.values(), *pushed, *forward_ad.unpack_dual(y)]

    for mine, theirs in zip(slopes(model), slopes(whole), strict=True):
        torch.testing.assert_close(mine, theirs)
