"""What a rank writes of an asynchronous run is read again."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.core.choices.updates import AppliedGradient
from echelon.parallel.storage.weights import Shard
from echelon.proof.replays.records import _write, read_rank


def test_a_rank_is_read_as_it_was_written(tmp_path: Path) -> None:
    """S07: the order, the losses, and pieces of parameters with their places."""
    values = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    shard = Shard(name="w", global_shape=(4, 3), offset=(1, 0), tensor=values, primary=True)
    told = {
        "samples": [[1, 2], [3, 4]],
        "losses": [0.1, 0.2],
        "sent": {"servers": 10},
        "held": {"parameters": 48},
        "applied": [[0, 1, 2, 3]],
    }
    _write(tmp_path / "rank-0003", told, [("parameters", "w", shard)])

    found = read_rank(tmp_path, 3)

    assert found.applied == [AppliedGradient(worker=0, step=1, read=2, version=3)]
    assert (found.samples, found.losses) == ({0: [1, 2], 1: [3, 4]}, {0: 0.1, 1: 0.2})
    (piece,) = found.pieces
    assert piece.region == (slice(1, 3), slice(0, 3))
    assert torch.equal(piece.values, values)
