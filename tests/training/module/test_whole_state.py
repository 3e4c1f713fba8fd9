"""Whole tensors go out of a module and into another one, and what does not fit is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.plan import Precision, Zero
from echelon.layout.modules import ModuleSplit, TensorPiece
from echelon.parallel.module.module import RankModule
from echelon.training.module.optimizer import ModuleOptimizer
from echelon.training.module.state import WholeTensors
from echelon.training.optimizer import SliceOptimizer
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


class DeviceGroup:
    """A group that, as NCCL does, sends what is on its device and nothing else."""

    def __init__(self, device: torch.device, size: int = 2) -> None:
        self.device, self.size, self.index = device, size, 0
        self.calls: list[str] = []

    def gather_objects(self, mine: object) -> list[Any]:
        """Return what this rank says, and what the second stage has: nothing."""
        return [mine, (1, [])]

    def all_reduce(self, values: torch.Tensor, *, name: str) -> Any:
        """Send from the device."""
        return self._sent(name, values)

    def all_gather(self, out: torch.Tensor, values: torch.Tensor, *, name: str) -> Any:
        """Send from the device, to there."""
        return self._sent(name, out, values)

    def _sent(self, name: str, *values: torch.Tensor) -> Any:
        assert {one.device for one in values} == {self.device}, name
        self.calls.append(name)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
def test_state_in_host_memory_is_sent_from_the_device(stages: bool, pieces: bool) -> None:
    device = torch.device("meta")
    optimizer = made(0, seed=1)
    host = optimizer.slices.state()
    assert {one.device.type for held in host.values() for one in held.values()} == {"cpu"}
    own = optimizer.module
    for bucket in own.buckets:
        bucket.values = bucket.values.to(device)
    cut = TensorPiece(name="0.weight", shape=(8, 3), dim=0, parts=(8,))
    world, tensor, alone = (DeviceGroup(device, size) for size in (2, 2, 1))
    module = SimpleNamespace(
        plan=plan_of(pp=2),
        device=device,
        groups=SimpleNamespace(rank=0, world=world, tensor=tensor, data=alone, shard=alone),
        owners=dict.fromkeys([one.spec.name for one in own.parameters], 0) if stages else {},
        foreign={},
        split=ModuleSplit(
            degree=2 if pieces else 1,
            pieces=(cut,) if pieces else (),
            layers=(),
            summed=frozenset(),
        ),
        all_buckets=own.buckets,
        parameters=own.parameters,
        model=own.model.to(device),
    )
    whole = WholeTensors(cast("RankModule", module), cast("SliceOptimizer", optimizer.slices))
    found: dict[str, tuple[int, ...]] = {}
    whole.give(lambda kind, name, one: found.__setitem__(f"{kind} {name}", tuple(one.shape)))
    assert found["exp_avg 0.weight"] == ((8, 3) if pieces else (4, 3))
    assert ("full.exp_avg.1.bias" in world.calls) == stages
    assert ("full.exp_avg.0.weight" in tensor.calls) == pieces
