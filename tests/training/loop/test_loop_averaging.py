"""A round of one step: averaging, which with SGD inside is data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.launch.local.supervisor import RankPool
from echelon.training.checkpoint.index import PARAMETERS
from tests.training.small_runs import FP64, checkpoint_of, small_data, train, whole_state

SGD = ("optimizer.kind=sgd", "optimizer.clip_norm=none", "optimizer.learning_rate=0.01")
AVERAGED = ("local_sgd.every=1", "local_sgd.outer=sgd")


@pytest.mark.system("B06")
def test_rounds_of_one_step_are_data_parallelism(rank_pool: RankPool, tmp_path: Path) -> None:
    """Evidence of row B06: with SGD inside and plain SGD of rate 1 outside, H = 1 equals DDP.

    Both islands have as many tokens, so the mean of their gradients is that of the batch, and
    momentum is linear in gradients. Data without ignored labels gives each as many.
    """
    data = small_data(tmp_path)
    replicas = ("mesh.dp_replicate=2", *SGD, *FP64)
    train(rank_pool, tmp_path / "ddp", data, replicas)
    train(rank_pool, tmp_path / "local", data, (*replicas, *AVERAGED))
    for step in (2, 8):
        ours, theirs = (
            whole_state(checkpoint_of(tmp_path / run, step)) for run in ("local", "ddp")
        )
        names = [name for name in theirs if name.startswith(f"{PARAMETERS}/")]
        assert names
        for name in names:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-11, atol=1e-13, msg=name)
            # Each island goes on with what all agreed on.
            assert torch.equal(ours[f"island-1.{name}"], ours[name])
