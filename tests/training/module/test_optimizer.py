"""What the optimizer of a split module reports, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.launch.local.pool import RankPool
from tests.training.module import module_state_targets as targets


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_ignored_stays_that_of_each_rank(rank_pool: RankPool, stage: Any) -> None:
    ranks = rank_pool.run(targets.ignore_a_block, targets.plan(stage), world_size=2)
    for rank, (value, gradient, names) in enumerate(ranks):
        assert value == float(rank)
        assert gradient
        assert not any(name.startswith("blocks.1") for name in names)


def test_norms_and_rates_are_those_of_every_rank(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(targets.reports, targets.plan(3), world_size=2)
    assert first == second
    rates = [report.learning_rate for report in first]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert [report.step for report in first] == [0, 1, 2, 3]


def test_a_parameter_is_right_as_soon_as_step_returns(rank_pool: RankPool) -> None:
    # Loops read parameters between steps (averages, histograms): nothing is under way then.
    for stage in (0, 1, 2):
        whole, current = rank_pool.run(targets.read_after_step, targets.plan(stage), world_size=2)[
            0
        ]
        assert all(torch.equal(whole[name], current[name]) for name in whole)
