"""Buckets made by hand, for tests without a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.core.event import NoEvents
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer
from echelon.layout.buckets import BucketPlan
from echelon.parallel.storage.buckets import Bucket, BucketRule, make_buckets
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder


def alone() -> Group:
    """Return a group of one rank."""
    return Group("tp", (0,), 0, None, Recorder(0, NoEvents()))


def by_hand(
    parameters: Mapping[str, nn.Parameter],
    cuts: Sequence[Sequence[str]],
    *,
    padding: int = 0,
    uses: Mapping[str, int] | None = None,
    counted: Mapping[str, bool] | None = None,
    gradients: torch.dtype | None = None,
) -> list[Bucket]:
    """Return one bucket for each list of names, each with `padding` elements at its end.

    Gradients add up in the dtype of the parameters, or in `gradients`.
    """
    specs = [
        ParameterSpec(name=name, shape=tuple(one.shape), layer=0)
        for name, one in parameters.items()
    ]
    plans = [
        BucketPlan(
            name=f"bucket{index}",
            kind="whole",
            names=tuple(names),
            num_elements=sum(parameters[name].numel() for name in names) + padding,
        )
        for index, names in enumerate(cuts)
    ]
    like = next(iter(parameters.values())).detach()
    rule = BucketRule(
        plans=plans,
        optimizer=Optimizer(),
        counted={name: True for name in parameters} | dict(counted or {}),
        uses=dict(uses or {}),
        gradients=gradients or like.dtype,
    )
    return make_buckets(dict(parameters), specs, rule, like)


class Noted(Reduction):
    """Write down which buckets are full."""

    def __init__(self, full: list[str]) -> None:
        """Write into `full`."""
        self.full = full

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        """Write the name of a bucket down."""
        self.full.append(bucket.name)


def store_of(
    parameters: Mapping[str, nn.Parameter], gradients: torch.dtype | None = None
) -> GradientStore:
    """Return a store that holds `parameters` in one bucket."""
    store = GradientStore(Reduction())
    store.hold(by_hand(parameters, [list(parameters)], gradients=gradients))
    store.start_step()
    return store


def matrix(*shape: int, seed: int = 0) -> nn.Parameter:
    """Return a random float64 parameter."""
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))


class Called(TorchDispatchMode):
    """Note what is called, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
