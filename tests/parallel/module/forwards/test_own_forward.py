"""A forward of one module stays with that module, and knows the calls that it must not answer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from echelon.parallel.module.forwards.own_forward import OwnForward, is_plain_call, is_transformed


class Twice(OwnForward):
    """Twice of what the class gives."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * self.of_class(*args, **kwargs)


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_a_copy_computes_as_its_class_says(twin: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    plain = model[0](torch.ones(3))
    model[0].forward = Twice(model[0])
    assert torch.equal(model(input=torch.ones(3)), 2 * plain)
    assert torch.equal(twin(model)(torch.ones(3)), plain)
    assert torch.equal(twin(model[0])(torch.ones(3)), plain)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_which_calls_are_plain() -> None:
    x = torch.ones(3)
    assert is_plain_call(x)
    assert not is_plain_call([1.0])
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_plain_call(x)
    seen: list[tuple[bool, bool]] = []

    def note(one: torch.Tensor) -> torch.Tensor:
        seen.append((is_plain_call(one), is_transformed()))
        return one.sum()

    torch.func.grad(note)(x)
    torch.func.vmap(note)(x.unsqueeze(0))
    torch.func.jvp(note, (x,), (x,))
    with forward_ad.dual_level():
        note(x)
    assert seen == [(False, True)] * 4
    note(x)
    assert seen[-1] == (True, False)
