"""The outer step by hand arithmetic, and beside PyTorch's SGD."""

from __future__ import annotations

import pytest
import torch

from echelon.core.choices.local_sgd import LocalSgd
from echelon.training.local_sgd.outer_steps import outer_update

SGD = LocalSgd(every=2, islands=2, outer="sgd", outer_learning_rate=0.5)
NESTEROV = LocalSgd(
    every=2, islands=2, outer="nesterov", outer_learning_rate=0.5, outer_momentum=0.75
)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_plain_sgd_by_hand() -> None:
    """Evidence of row B06: 4 - 0.5 x 2 = 3, and -1 - 0.5 x -6 = 2."""
    parameters = double(4.0, -1.0)
    outer_update(SGD, parameters, double(2.0, -6.0), None)
    assert parameters.tolist() == [3.0, 2.0]


@pytest.mark.system("B06")
def test_nesterov_by_hand_over_two_rounds() -> None:
    """Evidence of row B06: all numbers are binary fractions, so nothing is rounded.

    Round 1: m = 0.75 x 0 + 2 = 2;      p = 4 - 0.5 (2 + 0.75 x 2) = 2.25
    Round 2: m = 0.75 x 2 + 1 = 2.5;    p = 2.25 - 0.5 (1 + 0.75 x 2.5) = 0.8125
    """
    parameters, momentum = double(4.0), double(0.0)
    outer_update(NESTEROV, parameters, double(2.0), momentum)
    assert (parameters.item(), momentum.item()) == (2.25, 2.0)
    outer_update(NESTEROV, parameters, double(1.0), momentum)
    assert (parameters.item(), momentum.item()) == (0.8125, 2.5)


def test_averaging_is_plain_sgd_of_rate_one() -> None:
    """Evidence of row B06: 8 - ((8 - 4) + (8 - 2)) / 2 = 3, the mean of 4 and 2."""
    outer, islands = double(8.0), (double(4.0), double(2.0))
    mean = sum((outer - one for one in islands), double(0.0)) / 2
    outer_update(LocalSgd(every=1, islands=2), outer, mean, None)
    assert outer.item() == 3.0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_that_of_torch(momentum: float) -> None:
    local = LocalSgd(
        every=1, islands=2, outer="nesterov", outer_learning_rate=0.7, outer_momentum=momentum
    )
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    ours, state = theirs.detach().clone(), torch.zeros(5, dtype=torch.float64)
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for _ in range(4):
        moved = torch.randn(5, dtype=torch.float64, generator=generator)
        theirs.grad = moved.clone()
        optimizer.step()
        outer_update(local, ours, moved, state)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-14, atol=1e-15)
