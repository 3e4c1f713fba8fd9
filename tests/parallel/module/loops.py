"""Loops over a split module on ranks, and what one device makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Optimizer, Plan, Zero
from echelon.launch.local.supervisor import RankPool
from tests.parallel.layouts import plan_of
from tests.parallel.module import targets
from tests.parallel.module.targets import Loop, Looped

ADAMW = Optimizer(total_steps=8, clip_norm=0.5, eps=1e-3, warmup_steps=2, learning_rate=1e-2)
SLICES = Zero(stage=3, accumulate="slices")
WHOLE = Zero(stage=3)
STAGES = [
    pytest.param(Zero(), id="stage 0"),
    pytest.param(Zero(stage=1), id="stage 1"),
    pytest.param(Zero(stage=2, accumulate="slices"), id="stage 2"),
    pytest.param(SLICES, id="stage 3"),
    pytest.param(WHOLE, id="stage 3 whole gradients"),
]


BLOCKS = [f"blocks.{index}" for index in range(4)]


def plan(zero: Zero, **changes: Any) -> Plan:
    """Return a plan over two data ranks, or over those that `changes` name."""
    if not {"dp", "dp_shard"} & set(changes):
        changes["dp" if zero.stage == 0 else "dp_shard"] = 2
    return plan_of(zero=zero, **{"optimizer": ADAMW, "bucket_bytes": 2000, **changes})


def run(rank_pool: RankPool, loop: Loop, timeout_s: float = 120.0) -> list[Looped]:
    """Run a loop on the ranks of its plan."""
    return rank_pool.run(
        targets.train, loop, world_size=loop.plan.mesh.world_size, timeout_s=timeout_s
    )


def assert_as_on_one_device(ranks: list[Looped], loop: Loop, tolerance: float = 1e-12) -> None:
    """Compare the norm of every step and all parameters after the last with one device."""
    expected = targets.one_device(loop, loop.plan.mesh.world_size)
    for rank in ranks:
        for report, (_, norm) in zip(rank.reports, expected, strict=True):
            assert report.grad_norm == pytest.approx(norm, rel=tolerance)
            assert not report.skipped
    values, _ = expected[-1]
    assert set(ranks[0].after) == set(dict(targets.make(loop.model).named_parameters()))
    for name, value in values.items():
        torch.testing.assert_close(
            ranks[0].after[name].to(value.dtype), value, rtol=0, atol=tolerance, msg=name
        )
    start = dict(targets.make(loop.model).named_parameters())
    assert any((values[name] - start[name]).abs().max() > 1e-3 for name in values)
