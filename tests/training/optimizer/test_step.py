"""One rank's update against torch's optimizers; what is frozen, the norm, and the order of jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.event import NoEvents
from echelon.core.plan import Optimizer, OptimizerKind, Plan, Precision
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.recorder import Recorder
from echelon.training.optimizer import MASTER, SliceOptimizer, local_norm_squared
from echelon.training.optimizer.trained_ranges import trained_ranges
from tests.parallel.buckets import by_hand, matrix
from tests.parallel.layouts import plan_of
from tests.training.optimizer.optimizer_targets import start_masters

SETTINGS = Optimizer(beta1=0.8, beta2=0.9, eps=1e-3, momentum=0.7, weight_decay=0.3)
RATES = (0.1, 0.05, 0.2, 0.0)
CPU = torch.device("cpu")
Values = Mapping[str, torch.Tensor]


def make(kind: OptimizerKind = "adamw") -> tuple[dict[str, nn.Parameter], list[Bucket]]:
    """Return two matrices and two vectors in two padded buckets."""
    parameters = {"a": matrix(4, 3), "bias": matrix(4, seed=1)}
    parameters |= {"b": matrix(2, 5, seed=2), "norm": matrix(5, seed=3)}
    buckets = by_hand(parameters, [["bias", "a"], ["norm", "b"]], padding=2)
    for bucket in buckets:
        bucket.plan = replace(bucket.plan, update=kind)
    return parameters, buckets


def optimizer_of(buckets: Sequence[Bucket], plan: Plan | None = None) -> SliceOptimizer:
    """Return an optimizer of one rank."""
    plan = plan or plan_of(optimizer=SETTINGS)
    return SliceOptimizer(buckets, plan, groups=alone(plan), device=CPU)


def alone(plan: Plan) -> RankGroups:
    """Return the groups of a plan of one rank."""
    return rank_groups(plan, Recorder(0, NoEvents()))


def gradients(parameters: Values, step: int) -> dict[str, torch.Tensor]:
    """Return made-up gradients of a step."""
    return {
        name: matrix(*one.shape, seed=10 * step + index).detach()
        for index, (name, one) in enumerate(parameters.items())
    }


def put(buckets: list[Bucket], values: Values) -> None:
    """Write gradients into the buckets; padding is not a number."""
    for bucket in buckets:
        bucket.gradients.fill_(math.nan)
        for slot in bucket.slots:
            slot.gradient.copy_(values[slot.spec.name])


def ignore(bucket: Bucket) -> None:
    """Learn that a bucket is updated."""


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_are_those_of_torch(kind: OptimizerKind) -> None:
    parameters, buckets = make(kind)
    copies = {name: nn.Parameter(one.detach().clone()) for name, one in parameters.items()}
    groups = [
        {"params": [one], "weight_decay": 0.3 if one.dim() > 1 else 0.0} for one in copies.values()
    ]
    theirs = (
        torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3, fused=True)
        if kind == "adamw"
        else torch.optim.SGD(groups, momentum=0.7, fused=True)
    )
    ours = optimizer_of(buckets)
    for step, rate in enumerate(RATES):
        values = gradients(parameters, step)
        put(buckets, values)
        ours.update(rate, 0.5, ignore)
        for name, one in copies.items():
            one.grad = values[name] * 0.5
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
    for name, one in parameters.items():
        torch.testing.assert_close(one, copies[name], rtol=4e-16, atol=0, msg=name)
        state = theirs.state[copies[name]]
        for kept in OPTIMIZERS[kind].state:
            slot = next(s for b in buckets for s in b.slots if s.spec.name == name)
            flat = ours.state()[kept][slot.bucket.name][slot.start : slot.end].view(one.shape)
            torch.testing.assert_close(
                flat, state[kept if kind == "adamw" else "momentum_buffer"], rtol=4e-16, atol=0
            )
    for bucket in buckets:
        assert not bucket.values[bucket.slots[-1].end :].any()


@pytest.mark.parametrize("seen", [0, 7])
def test_the_bias_correction_counts_all_updates(seen: int) -> None:
    parameters, buckets = make()
    before = parameters["a"].detach().clone()
    optimizer = optimizer_of(buckets)
    optimizer.set_num_steps(seen)
    put(buckets, gradients(parameters, 0))
    optimizer.update(0.1, 1.0, ignore)
    g, count = gradients(parameters, 0)["a"], seen + 1
    mean, square = 0.2 * g / (1 - 0.8**count), 0.1 * g * g / (1 - 0.9**count)
    expected = before - 0.1 * (mean / (square.sqrt() + 1e-3) + 0.3 * before)
    torch.testing.assert_close(parameters["a"].detach(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_state_is_filled_in_place_to_go_on_from_a_checkpoint(kind: OptimizerKind) -> None:
    parameters, buckets = make(kind)
    optimizer = optimizer_of(buckets)
    for step in range(2):
        put(buckets, gradients(parameters, step))
        optimizer.update(RATES[step], 1.0, ignore)
    others, fresh = make(kind)
    for one, other in zip(parameters.values(), others.values(), strict=True):
        other.data.copy_(one.data)
    resumed = optimizer_of(fresh)
    assert tuple(resumed.state()) == OPTIMIZERS[kind].state
    for kept, flats in optimizer.state().items():
        for name, flat in flats.items():
            resumed.state()[kept][name].copy_(flat)
    resumed.set_num_steps(2)
    for one, where in ((optimizer, buckets), (resumed, fresh)):
        put(where, gradients(parameters, 2))
        one.update(RATES[2], 1.0, ignore)
    for one, other in zip(parameters.values(), others.values(), strict=True):
        assert torch.equal(one, other)


def test_gradients_are_scaled_in_place_and_once() -> None:
    parameters, buckets = make()
    values = gradients(parameters, 0)
    put(buckets, values)
    optimizer_of(buckets).update(0.1, 0.25, ignore)
    for bucket in buckets:
        for slot in bucket.slots:
            assert torch.equal(slot.gradient, values[slot.spec.name] * 0.25)


def test_a_narrow_gradient_is_cast_before_it_is_scaled() -> None:
    # 65504 x 2^-10 = 63.96875: in float16, where it is not cast first, factor and product round.
    parameter = nn.Parameter(torch.zeros(6, dtype=torch.float16))
    (bucket,) = by_hand({"a": parameter}, [["a"]])
    bucket.plan = replace(bucket.plan, update="sgd")
    precision = Precision(parameters="fp16", gradients="fp16", reduction="fp16", master="fp32")
    settings = replace(SETTINGS, kind="sgd", weight_decay=0.0)
    optimizer = optimizer_of([bucket], plan_of(optimizer=settings, precision=precision))
    start_masters(optimizer, [bucket])
    bucket.gradients.fill_(65504.0)
    optimizer.update(1.0, 3e-5, ignore)
    master = optimizer.state()[MASTER][bucket.name]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((6,), -65504.0 * 3e-5), rtol=1e-6, atol=0.0)
    assert torch.equal(parameter, master.half())
    assert torch.equal(bucket.gradients, torch.full((6,), 65504.0, dtype=torch.float16))


@pytest.mark.parametrize("length", [1 << 20, (1 << 20) + 1, 3 << 20])
def test_long_slices_are_cast_and_updated_in_pieces(length: int) -> None:
    first = torch.linspace(-1, 1, length).bfloat16()
    (bucket,) = by_hand({"a": nn.Parameter(first.clone())}, [["a"]], padding=3)
    precision = Precision(parameters="bf16", gradients="bf16", reduction="bf16", master="fp32")
    optimizer = optimizer_of([bucket], plan_of(optimizer=SETTINGS, precision=precision))
    start_masters(optimizer, [bucket])
    bucket.gradients.copy_(torch.linspace(1, -2, length + 3))
    whole = nn.Parameter(first.float())
    whole.grad = bucket.gradients[:length].float() * 0.5
    theirs = torch.optim.AdamW([whole], betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0, fused=True)
    theirs.param_groups[0]["lr"] = 0.1
    theirs.step()
    optimizer.update(0.1, 0.5, ignore)
    master = optimizer.state()[MASTER][bucket.name]
    torch.testing.assert_close(master[:length], whole.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(bucket.values, master.bfloat16())


def test_what_is_frozen_keeps_its_value_and_has_no_state_of_its_own() -> None:
    parameters = {name: matrix(4, 3, seed=index) for index, name in enumerate("abcd")}
    before = {name: one.detach().clone() for name, one in parameters.items()}
    buckets = by_hand(parameters, [["a", "b", "c"], ["d"]], padding=1)
    parameters["b"].requires_grad_(False)
    parameters["d"].requires_grad_(False)
    assert [part for part, _ in trained_ranges(buckets[0])] == [slice(0, 12), slice(24, 36)]
    optimizer = optimizer_of(buckets)
    put(buckets, gradients(parameters, 0))
    order: list[str] = []
    optimizer.update(0.1, 1.0, lambda bucket: order.append(bucket.name))
    assert order == ["bucket0"]
    assert all([*flats] == ["bucket0"] for flats in optimizer.state().values())
    for name, one in parameters.items():
        assert torch.equal(one, before[name]) == (name in "bd")
    for flats in optimizer.state().values():
        assert not flats["bucket0"][12:24].any()


@pytest.mark.parametrize("own", [slice(0, 19), slice(5, 24), slice(12, 14), slice(30, 40)])
def test_the_norm_counts_what_this_rank_counts(own: slice) -> None:
    parameters = {"a": matrix(3, 4), "b": matrix(2, 5, seed=2), "c": matrix(7, 2, seed=3)}
    (bucket,) = by_hand(parameters, [["a", "b", "c"]], padding=4, counted={"b": False})
    values = gradients(parameters, 0)
    put([bucket], values)
    whole = bucket.gradients.clone()
    whole[12:22] = 0.0
    whole[36:] = 0.0
    bucket.own, bucket.gradient_slice = own, bucket.gradients[own]
    expected = float(whole[own].square().sum())
    assert local_norm_squared([bucket]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_small_gradients_in_narrow_precision_beside_few_large_ones(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(1 << 22, dtype=dtype))
    (bucket,) = by_hand({"a": parameter}, [["a"]])
    bucket.gradients.copy_(torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 1e-2)
    bucket.gradients[:1000] = 300.0
    exact = float(bucket.gradients.double().square().sum())
    assert local_norm_squared([bucket]) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_norm(poison: float, dtype: torch.dtype) -> None:
    parameters = {name: nn.Parameter(torch.ones(5, 2, dtype=dtype)) for name in "ab"}
    buckets = by_hand(parameters, [["a"], ["b"]])
    for bucket in buckets:
        bucket.gradients.fill_(1.0)
    assert local_norm_squared(buckets) == 20.0
    buckets[1].gradients[3] = poison
    assert not math.isfinite(local_norm_squared(buckets))
