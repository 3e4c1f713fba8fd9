"""What the optimizer of a split module saves, loads and shows; what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.plan import Optimizer, Plan, Precision, Zero
from echelon.launch.pool import RankPool
from tests.parallel.layouts import plan_of
from tests.train import module_state_targets as targets

BF16 = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")
OPTIMIZER = Optimizer(total_steps=20, warmup_steps=3, learning_rate=1e-2, eps=1e-3)


def plan(stage: Any, **changes: Any) -> Plan:
    """Return a plan over two ranks."""
    mesh: dict[str, Any] = {"dp_shard" if stage else "dp": 2}
    zero = Zero(stage=stage, accumulate="slices" if stage > 1 else "whole")
    return plan_of(**{"zero": zero, "optimizer": OPTIMIZER, **mesh, **changes})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [None, BF16])
def test_a_saved_state_goes_on_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, stage: Any, precision: Precision | None
) -> None:
    one = plan(stage, precision=precision)
    for straight, resumed in rank_pool.run(targets.resume, (one, str(tmp_path)), world_size=2):
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_full_state_is_every_whole_tensor_on_rank_0(rank_pool: RankPool, stage: Any) -> None:
    ranks = rank_pool.run(targets.full_states, plan(stage, precision=BF16), world_size=2)
    kinds, shapes, same = ranks[0]
    assert kinds == {"parameters", "master", "exp_avg", "exp_avg_sq"}
    assert shapes == targets.SHAPES
    assert same
    assert ranks[1] == (set(), {}, True)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", [None, BF16])
def test_what_is_loaded_inside_of_whole_is_kept(
    rank_pool: RankPool, stage: Any, precision: Precision | None
) -> None:
    for wrong, masters_wrong, untouched in rank_pool.run(
        targets.load_whole, plan(stage, precision=precision), world_size=2
    ):
        assert wrong == []
        assert masters_wrong == []
        assert untouched


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_ignored_stays_that_of_each_rank(rank_pool: RankPool, stage: Any) -> None:
    ranks = rank_pool.run(targets.ignore_a_block, plan(stage), world_size=2)
    for rank, (value, gradient, names) in enumerate(ranks):
        assert value == float(rank)
        assert gradient
        assert not any(name.startswith("blocks.1") for name in names)


def test_norms_and_rates_are_those_of_every_rank(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(targets.reports, plan(3), world_size=2)
    assert first == second
    rates = [report.learning_rate for report in first]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert [report.step for report in first] == [0, 1, 2, 3]


def test_a_parameter_is_right_as_soon_as_step_returns(rank_pool: RankPool) -> None:
    # Loops read parameters between steps (averages, histograms): nothing is under way then.
    for stage in (0, 1, 2):
        whole, current = rank_pool.run(targets.read_after_step, plan(stage), world_size=2)[0]
        assert all(torch.equal(whole[name], current[name]) for name in whole)
