"""A split module's slices are saved, loaded, shown whole, and written while they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.plan import Precision
from echelon.launch.local.supervisor import RankPool
from tests.training.module import module_state_targets as targets

BF16 = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [None, BF16])
def test_a_saved_state_goes_on_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, stage: Any, precision: Precision | None
) -> None:
    one = targets.plan(stage, precision=precision)
    for straight, resumed in rank_pool.run(targets.resume, (one, str(tmp_path)), world_size=2):
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_full_state_is_every_whole_tensor_on_rank_0(rank_pool: RankPool, stage: Any) -> None:
    ranks = rank_pool.run(targets.full_states, targets.plan(stage, precision=BF16), world_size=2)
    kinds, shapes, same = ranks[0]
    assert kinds == {"parameters", "master", "exp_avg", "exp_avg_sq"}
    assert shapes == targets.SHAPES
    assert same
    assert ranks[1] == (set(), {}, True)


@pytest.mark.parametrize("stage", [0, 3])
def test_steps_saves_and_loads_are_refused_inside_of_whole(
    rank_pool: RankPool, tmp_path: Path, stage: Any
) -> None:
    arguments = targets.plan(stage, precision=BF16), str(tmp_path / "state.pt")
    for rules, untouched in rank_pool.run(targets.refused_while_whole, arguments, world_size=2):
        assert rules == ["values-away"] * 5
        assert untouched


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", [None, BF16])
def test_what_is_loaded_inside_of_whole_is_kept(
    rank_pool: RankPool, stage: Any, precision: Precision | None
) -> None:
    for wrong, masters_wrong, untouched in rank_pool.run(
        targets.load_whole, targets.plan(stage, precision=precision), world_size=2
    ):
        assert wrong == []
        assert masters_wrong == []
        assert untouched
