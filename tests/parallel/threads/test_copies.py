"""A module as each replica has it: what is shared stays shared; what cannot be copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.parallel.threads.copies import ModuleCopies, state_of, trained_tensors

CPU = torch.device("cpu")


def tied() -> Any:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "n": nn.BatchNorm1d(3)})
    model["b"].weight = model["a"].weight
    model["again"] = model["a"]
    model["a"].bias.requires_grad_(False)
    return model


def test_shared_tensors_are_counted_and_copied_once() -> None:
    model = tied()
    assert len(state_of(model)) == len(
        {id(one) for one in model.state_dict(keep_vars=True).values()}
    )
    assert len(trained_tensors(model)) == 4
    copies = ModuleCopies(model, [CPU] * 3)
    size = sum(one.nbytes for one in state_of(model))
    assert [copies.extend(2), copies.extend(2), copies.extend(3)] == [size, 0, size]
    for index in range(3):
        here: Any = copies.replica(index)[0]
        assert here["a"].weight is here["b"].weight
        assert here["again"] is here["a"]
        assert [one.requires_grad for one in here.parameters()] == [
            one.requires_grad for one in model.parameters()
        ]
        assert list(here.state_dict()) == list(model.state_dict())
        aliased = here["a"].weight.data_ptr() == model["a"].weight.data_ptr()
        assert aliased == (index == 0)
        assert (here["n"].running_mean is model["n"].running_mean) == (index == 0)
        assert here["a"].weight is not model["a"].weight


def test_modes_and_hooks_are_those_of_now() -> None:
    model: Any = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    copies = ModuleCopies(model, [CPU] * 2)
    copies.extend(2)
    model.eval()
    model[0].p = 0.25
    model[1].register_forward_hook(lambda _, __, out: out + 1)
    here: Any = copies.replica(1)[0]
    assert not here[0].training
    assert here[0].p == 0.25
    assert here(torch.ones(2)).tolist() == [2, 2]


def test_a_parameter_that_was_replaced_has_changed() -> None:
    model = nn.Linear(2, 2)
    copies = ModuleCopies(model, [CPU] * 2)
    copies.require_unchanged()
    model.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ec.ConfigError, match="replicas have the old ones"):
        copies.require_unchanged()


def compiled() -> Any:
    return torch.compile(nn.Linear(2, 2), backend="eager")


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile(backend="eager")
    return model


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta", bias=False)


def partly_elsewhere() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].to("meta")
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (on_meta, "weight is on the meta device"),
        (partly_elsewhere, "1.weight is on the meta device"),
        (lambda: nn.LazyLinear(2), "weight has no shape yet"),
        pytest.param(compiled, "the module is compiled by torch.compile", marks=pytest.mark.slow),
        pytest.param(compiled_in_place, "0 is compiled by torch.compile", marks=pytest.mark.slow),
        (
            lambda: ec.threaded(nn.Linear(2, 2), replicas=2),
            "the module is a ThreadedModule already",
        ),
        (lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "0 is a DataParallel already"),
    ],
)
def test_a_module_that_cannot_be_copied(make: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(ec.ConfigError) as caught:
        ec.threaded(make(), devices=["cpu", "cpu"])
    assert set(caught.value.rules) == {"threaded-module"}
    assert told in str(caught.value)
