"""AdamW on flat buckets against the formula; the norm and clipping against their definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from echelon.core.plan import Optimizer
from echelon.parallel.buckets import Bucket
from echelon.train.optimizer import STATE_KINDS, FlatAdamW, local_norm_squared, scale_gradients
from tests.parallel.buckets import by_hand, matrix

SETTINGS = Optimizer(learning_rate=1.0, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3)
RATES = (0.1, 0.05, 0.2, 0.0)


def make() -> tuple[dict[str, nn.Parameter], list[Bucket]]:
    """Return two matrices and two vectors in two padded buckets."""
    parameters = {"a": matrix(4, 3), "bias": matrix(4, seed=1)}
    parameters |= {"b": matrix(2, 5, seed=2), "norm": matrix(5, seed=3)}
    return parameters, by_hand(parameters, [["bias", "a"], ["norm", "b"]], padding=2)


def gradients(parameters: Mapping[str, nn.Parameter], step: int) -> dict[str, torch.Tensor]:
    """Return made-up gradients of a step."""
    return {
        name: matrix(*one.shape, seed=10 * step + index).detach()
        for index, (name, one) in enumerate(parameters.items())
    }


def put(buckets: list[Bucket], values: Mapping[str, torch.Tensor]) -> None:
    """Write gradients into the buckets."""
    for bucket in buckets:
        for slot in bucket.slots:
            slot.gradient.copy_(values[slot.spec.name])


def by_formula(start: Mapping[str, torch.Tensor], first_step: int = 0) -> dict[str, torch.Tensor]:
    """Return the parameters after all rates (Loshchilov and Hutter, algorithm 2)."""
    after: dict[str, torch.Tensor] = {}
    for name, first in start.items():
        value, mean, square = first.clone(), torch.zeros_like(first), torch.zeros_like(first)
        for step, rate in enumerate(RATES):
            g = gradients(dict(make()[0]), step)[name]
            mean = 0.8 * mean + 0.2 * g
            square = 0.9 * square + 0.1 * g * g
            count = first_step + step + 1
            direction = mean / (1 - 0.8**count)
            direction = direction / ((square / (1 - 0.9**count)).sqrt() + 1e-3)
            decay = 0.3 * value if value.dim() > 1 else 0.0
            value -= rate * (direction + decay)
        after[name] = value
    return after


@pytest.mark.parametrize("seen", [0, 7])
def test_updates_equal_the_formula(seen: int) -> None:
    parameters, buckets = make()
    start = {name: one.detach().clone() for name, one in parameters.items()}
    adamw = FlatAdamW(buckets, SETTINGS)
    adamw.set_num_steps(seen)
    for step, rate in enumerate(RATES):
        put(buckets, gradients(parameters, step))
        adamw.update(rate)
    for name, expected in by_formula(start, seen).items():
        torch.testing.assert_close(
            parameters[name].detach(), expected, rtol=1e-12, atol=1e-13, msg=name
        )
    for bucket in buckets:
        assert not bucket.values[bucket.slots[-1].end :].any()


def test_moments_lie_as_the_buckets_do() -> None:
    parameters, buckets = make()
    adamw = FlatAdamW(buckets, SETTINGS)
    values = gradients(parameters, 0)
    put(buckets, values)
    adamw.update(0.1)
    assert tuple(adamw.moments) == STATE_KINDS
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            g = values[slot.spec.name].reshape(-1)
            part = slice(slot.start, slot.end)
            torch.testing.assert_close(adamw.moments["exp_avg"][index][part], 0.2 * g)
            torch.testing.assert_close(adamw.moments["exp_avg_sq"][index][part], 0.1 * g * g)


def test_moments_are_filled_in_place_to_go_on_from_a_checkpoint() -> None:
    parameters, buckets = make()
    adamw = FlatAdamW(buckets, SETTINGS)
    for step in range(2):
        put(buckets, gradients(parameters, step))
        adamw.update(RATES[step])
    saved = [[one.clone() for one in adamw.moments[kind]] for kind in STATE_KINDS]
    others, fresh = make()
    for one, other in zip(parameters.values(), others.values(), strict=True):
        other.data.copy_(one.data)
    resumed = FlatAdamW(fresh, SETTINGS)
    for kind, tensors in zip(STATE_KINDS, saved, strict=True):
        for mine, tensor in zip(resumed.moments[kind], tensors, strict=True):
            mine.copy_(tensor)
    resumed.set_num_steps(2)
    for optimizer, where in ((adamw, buckets), (resumed, fresh)):
        put(where, gradients(parameters, 2))
        optimizer.update(RATES[2])
    for one, other in zip(parameters.values(), others.values(), strict=True):
        assert torch.equal(one, other)


def test_the_norm_counts_what_this_rank_counts() -> None:
    parameters = {"a": matrix(300, 400), "b": matrix(2, 5, seed=2), "c": matrix(7, seed=3)}
    buckets = by_hand(parameters, [["a", "b"], ["c"]], padding=3, counted={"b": False})
    values = gradients(parameters, 0)
    put(buckets, values)
    for bucket in buckets:
        bucket.gradients[-3:] = 1e9
    expected = float(values["a"].square().sum() + values["c"].square().sum())
    assert local_norm_squared(buckets) == pytest.approx(expected, rel=1e-12)


def test_many_small_gradients_in_single_precision_beside_few_large_ones() -> None:
    parameter = nn.Parameter(torch.zeros(1 << 22))
    (bucket,) = by_hand({"a": parameter}, [["a"]])
    bucket.gradients.copy_(torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 1e-4)
    bucket.gradients[:1000] = 100.0
    exact = float(bucket.gradients.double().square().sum())
    assert local_norm_squared([bucket]) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_norm(poison: float) -> None:
    _, buckets = make()
    buckets[1].gradients[0] = poison
    assert not math.isfinite(local_norm_squared(buckets))


def test_gradients_are_scaled_in_place() -> None:
    parameters, buckets = make()
    values = gradients(parameters, 0)
    put(buckets, values)
    scale_gradients(buckets, 0.25)
    for bucket in buckets:
        for slot in bucket.slots:
            assert torch.equal(slot.gradient, values[slot.spec.name] * 0.25)
