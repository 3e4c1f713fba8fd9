"""AdamW on one element, by hand: both moments, their bias correction, and the decay beside them."""

from __future__ import annotations

import math

import pytest
import torch

from echelon.core.plan import Optimizer
from echelon.training.optimizer.elementwise import AdamW
from echelon.training.optimizer.trained_ranges import FusedOperands

SETTINGS = Optimizer(beta1=0.5, beta2=0.75, eps=0.25)


def update(rule: AdamW, target: float, gradient: float, state: tuple[float, float]) -> list[float]:
    """Return the target and both moments after one update with rate 0.1 and decay 0.5."""
    tensors = [torch.tensor([one], dtype=torch.float64) for one in (target, gradient, *state)]
    rule.update(
        FusedOperands(
            targets=[tensors[0]],
            gradients=[tensors[1]],
            state=[[tensors[2]], [tensors[3]]],
            rate=0.1,
            weight_decay=0.5,
        )
    )
    return [float(tensors[index]) for index in (0, 2, 3)]


def test_the_first_update_has_moments_that_are_the_gradients_own() -> None:
    rule = AdamW(SETTINGS)
    rule.start_update(1)
    # Bias correction makes of 0.5 g and 0.25 g^2 the gradient and its square: 2 / (2 + eps).
    expected = 3.0 - 0.1 * 0.5 * 3.0 - 0.1 * 2.0 / (2.0 + 0.25)
    assert update(rule, 3.0, 2.0, (0.0, 0.0)) == pytest.approx([expected, 1.0, 1.0], rel=1e-15)


def test_a_later_update_counts_all_before_it() -> None:
    rule = AdamW(SETTINGS)
    for count in (1, 2, 3):
        rule.start_update(count)
        if count != 2:  # the count is told, not counted here
            found = update(rule, 3.0, -2.0, (1.0, 4.0))
    mean, square = 0.5 * 1.0 + 0.5 * -2.0, 0.75 * 4.0 + 0.25 * 4.0
    step = mean / (1 - 0.5**3) / (math.sqrt(square / (1 - 0.75**3)) + 0.25)
    expected = 3.0 - 0.1 * 0.5 * 3.0 - 0.1 * step
    assert found == pytest.approx([expected, mean, square], rel=1e-14)
