"""The mistakes that a failed replay is compared with."""

from __future__ import annotations

import pytest

from echelon.proof.replays.asynchronous import _mistakes, _running_mean
from tests.parallel.servers.test_server import served_plan
from tests.training.servers.test_served import with_updates


def test_an_average_with_the_mean_so_far_is_unfair() -> None:
    """S07: weights 1/8, 1/8, 1/4 and 1/2, times W; together they are fair."""
    weights = [_running_mean(worker, 4) for worker in range(4)]
    assert weights == pytest.approx([0.5, 0.5, 1.0, 2.0])


def test_mistakes_are_those_that_a_plan_can_have() -> None:
    """S07: each server may update twice; damping is forgotten where there is some."""
    plan = served_plan(2, 2)
    names = [one.name for one in _mistakes(with_updates(plan, 2, 1.0))]
    assert names.count("twice") == 3
    assert "undamped" in names
    assert "undamped" not in [one.name for one in _mistakes(with_updates(plan, 2))]
    assert "replicas weighted" in [one.name for one in _mistakes(with_updates(plan, 0))]
