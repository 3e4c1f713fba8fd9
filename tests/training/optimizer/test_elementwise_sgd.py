"""SGD by hand: the decay is part of the gradient, and of the momentum where there is one."""

from __future__ import annotations

import pytest
import torch

from echelon.core.plan import Optimizer
from echelon.training.optimizer.elementwise import MomentumSgd, fused_sgd
from echelon.training.optimizer.trained_ranges import FusedOperands


def operands(target: torch.Tensor, *, momentum: torch.Tensor | None = None) -> FusedOperands:
    """Return an update by a gradient of 2 with rate 0.1 and decay 0.5."""
    return FusedOperands(
        targets=[target],
        gradients=[torch.full_like(target, 2.0)],
        state=[] if momentum is None else [[momentum]],
        rate=0.1,
        weight_decay=0.5,
    )


def test_momentum_adds_up_from_zero() -> None:
    rule = MomentumSgd(Optimizer(momentum=0.75))
    target, momentum = torch.tensor([4.0, -4.0]).double(), torch.zeros(2).double()
    expected, held = [4.0, -4.0], [0.0, 0.0]
    for count in (1, 2, 3):
        rule.start_update(count)
        rule.update(operands(target, momentum=momentum))
        held = [0.75 * m + 2.0 + 0.5 * x for m, x in zip(held, expected, strict=True)]
        expected = [x - 0.1 * m for x, m in zip(expected, held, strict=True)]
        assert momentum.tolist() == pytest.approx(held, rel=1e-14)
        assert target.tolist() == pytest.approx(expected, rel=1e-14)


def test_without_momentum_no_state_is_touched() -> None:
    target, held = torch.tensor([4.0]).double(), torch.tensor([float("nan")]).double()
    fused_sgd(operands(target), [held], 0.0)
    assert float(target) == pytest.approx(4.0 - 0.1 * (2.0 + 0.5 * 4.0), rel=1e-15)
    assert bool(held.isnan())


def test_nothing_is_updated_by_an_empty_call() -> None:
    fused_sgd(
        FusedOperands(targets=[], gradients=[], state=[], rate=1.0, weight_decay=0.0), [], 0.5
    )
