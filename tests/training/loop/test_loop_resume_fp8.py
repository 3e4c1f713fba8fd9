"""Scales of whole tensors in 8 bits look back on the same steps when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.training.checkpoint.index import STATE_FILE
from tests.training.loop.test_loop_resume_zero import DP2_TP2, go_on_under_four_layouts
from tests.training.small_runs import (
    FP64,
    checkpoint_of,
    read_steps,
    small_data,
    train,
    whole_state,
)

FP8 = ("precision.matmul=fp8", "precision.fp8_block=4", "precision.fp8_scales=tensor")
LAST_THREE = (*FP8, "precision.fp8_history=3")
BF16 = ("precision.parameters=bf16",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("text"))


def history_of(path: Path) -> dict[str, Any]:
    """Return the largest numbers that a checkpoint looks back on."""
    return json.loads((path / STATE_FILE).read_text())["engine"]["fp8_scales"]


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(rank_pool: RankPool, tmp_path: Path, data: Path) -> None:
    settings = (*DP2_TP2, *BF16, *LAST_THREE)
    train(rank_pool, tmp_path / "whole", data, settings)
    middle = checkpoint_of(tmp_path / "whole", 4)
    assert len(history_of(middle)["history"]) == 3
    train(rank_pool, tmp_path / "again", data, settings, resume=middle)
    unbroken, found = read_steps(tmp_path / "whole"), read_steps(tmp_path / "again")
    assert found == {step: unbroken[step] for step in range(5, 9)}
    last = [checkpoint_of(tmp_path / name, 8) for name in ("whole", "again")]
    assert history_of(last[0]) == history_of(last[1])
    expected, got = (whole_state(path) for path in last)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts(rank_pool: RankPool, tmp_path: Path, data: Path) -> None:
    go_on_under_four_layouts(rank_pool, tmp_path, data, (*FP64, *LAST_THREE))


def test_a_checkpoint_of_tiles_has_no_history_to_go_on_from(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    tiles = ("precision.matmul=fp8", "precision.fp8_block=4")
    train(rank_pool, tmp_path / "tiles", data, tiles)
    path = checkpoint_of(tmp_path / "tiles", 4)
    with pytest.raises(RankFailure, match=r"fp8_scales was 'block', is 'tensor'"):
        train(rank_pool, tmp_path / "tensors", data, FP8, resume=path)
