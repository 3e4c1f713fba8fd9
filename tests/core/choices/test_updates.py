"""Staleness, its bound and its price, by hand."""

from __future__ import annotations

import pytest

from echelon.core.choices.updates import Updates


def asynchronous(bound: int, damping: float = 0.0) -> Updates:
    return Updates(kind="asynchronous", max_staleness=bound, damping=damping)


@pytest.mark.parametrize(
    ("damping", "staleness", "rate"),
    [(0.0, 7, 0.8), (1.0, 0, 0.8), (1.0, 1, 0.4), (1.0, 3, 0.2), (2.0, 3, 0.05), (0.5, 3, 0.4)],
)
def test_the_rate_falls_with_staleness(damping: float, staleness: int, rate: float) -> None:
    """S07, A14: 0.8 / (1 + staleness)^damping."""
    assert asynchronous(2, damping).damped_rate(0.8, staleness) == pytest.approx(rate, rel=1e-15)


def test_the_bound_says_how_stale_a_gradient_can_be() -> None:
    """S07: (W - 1) (2 s + 1); with a bound of 0 nothing is stale."""
    assert asynchronous(1).most_stale(2) == 3
    assert asynchronous(2).most_stale(4) == 15
    assert asynchronous(0).most_stale(4) == 0
    assert Updates().most_stale(4) == 0


def test_updates_of_a_step() -> None:
    """S07: one for each worker, or one for all."""
    assert asynchronous(2).per_clock(4) == 4
    assert asynchronous(0).per_clock(4) == 1
    assert Updates().per_clock(4) == 1
