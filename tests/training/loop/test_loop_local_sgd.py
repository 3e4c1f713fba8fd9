"""Runs of local SGD: they go on bit for bit, in the middle of a round too, and stop together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.launch.local.supervisor import RankPool
from echelon.training.checkpoint.index import PARAMETERS
from tests.training.small_runs import (
    FP64,
    checkpoint_of,
    read_steps,
    small_data,
    train,
    whole_state,
)

BF16 = ("precision.parameters=bf16",)
ISLANDS = ("mesh.dp_replicate=2", "mesh.dp_shard=2", "zero.stage=1")
OTHER_INSIDE = ("mesh.dp_replicate=2", "mesh.tp=2")
ROUNDS = ("local_sgd.every=4",)
LATE = ("local_sgd.every=3", "local_sgd.delay=2", "local_sgd.fragments=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("text"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("rounds", "precision"), [(ROUNDS, BF16), (LATE, FP64)], ids=["rounds bf16", "late"]
)
def test_a_run_goes_on_bit_for_bit_in_the_middle_of_a_round(
    rounds: tuple[str, ...],
    precision: tuple[str, ...],
    rank_pool: RankPool,
    tmp_path: Path,
    data: Path,
) -> None:
    """Evidence of row B06: outer state, and sums that are under way, are in the checkpoint."""
    settings = (*ISLANDS, *rounds, *precision)
    train(rank_pool, tmp_path / "whole", data, settings)
    train(
        rank_pool,
        tmp_path / "again",
        data,
        settings,
        resume=checkpoint_of(tmp_path / "whole", 2),
    )
    for rank in range(4):
        unbroken, found = (read_steps(tmp_path / name, rank) for name in ("whole", "again"))
        assert sorted(found) == list(range(3, 9))
        assert all(values == unbroken[step] for step, values in found.items())
    expected, got = (whole_state(checkpoint_of(tmp_path / name, 8)) for name in ("whole", "again"))
    kinds = {name.split("/")[0] for name in got}
    assert {PARAMETERS, "outer.momentum", "island-0.parameters", "island-1.parameters"} <= kinds
    assert ("outer.gradients" in kinds) is (rounds is LATE)
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_run_goes_on_with_other_layouts_inside_of_islands(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    settings = (*ISLANDS, *LATE, *FP64)
    train(rank_pool, tmp_path / "whole", data, settings)
    middle = checkpoint_of(tmp_path / "whole", 4)
    train(rank_pool, tmp_path / "other", data, (*OTHER_INSIDE, *LATE, *FP64), resume=middle)
    unbroken, found = (read_steps(tmp_path / name) for name in ("whole", "other"))
    for step, values in found.items():
        assert values == pytest.approx(unbroken[step], rel=1e-11, abs=0)
