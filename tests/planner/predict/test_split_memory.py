"""What the fullest rank of a split holds follows what is cut."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from echelon.core.parameters import num_parameters
from echelon.core.plan import RecomputePolicy, ZeroStage
from echelon.planner.predict.split_memory import (
    GuideSplit,
    RankMemory,
    cost_inputs_from_split,
    memory_of_plan,
    rank_memory,
    state_precision,
)
from tests.handbook.guides.situations import plan_of

PLAN = plan_of("llama2-7b 8xh100 precision.parameters=bf16")


def _memory_of(split: GuideSplit, recompute: RecomputePolicy | None = None) -> RankMemory:
    return rank_memory(cost_inputs_from_split(PLAN, split, recompute))


def test_states_of_one_rank_are_those_of_every_weight() -> None:
    sizes = state_precision(PLAN)
    assert (sizes.parameters, sizes.master, sizes.moments) == (2, 4, 8)
    held = _memory_of(GuideSplit())
    assert held.states == pytest.approx(sizes.total * num_parameters(PLAN.model), rel=1e-3)
    assert held.total == sum(asdict(held).values())
    assert held.gathered == 0


def test_every_stage_of_zero_holds_less_state() -> None:
    stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    states = [_memory_of(GuideSplit(dp=8, zero=stage)).states for stage in stages]
    assert states == sorted(states, reverse=True)
    assert states[3] == pytest.approx(states[0] / 8, rel=1e-3)


def test_recompute_keeps_less_and_changes_of_a_plan_are_applied() -> None:
    kept = _memory_of(GuideSplit(dp=8), "none").activations
    assert _memory_of(GuideSplit(dp=8), "full").activations < kept / 2
    assert memory_of_plan(PLAN, tp=2.0).states < 0.6 * memory_of_plan(PLAN).states
