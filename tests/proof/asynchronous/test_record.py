"""What a rank writes of an asynchronous run is read again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from echelon.core.choices.updates import AppliedGradient, WorkerChange
from echelon.parallel.weights import Shard
from echelon.proof.asynchronous.record import _write, read_rank


def place(rank: int, attempt: int = 0) -> Any:
    """Return as much of a context as a rank needs to write."""
    return SimpleNamespace(rank=rank, attempt=attempt)


def test_a_rank_is_read_as_it_was_written(tmp_path: Path) -> None:
    """S07: the order, the losses, and pieces of parameters with their places."""
    values = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    shard = Shard(name="w", global_shape=(4, 3), offset=(1, 0), tensor=values, primary=True)
    told = {
        "first": 0,
        "samples": [[1, 2], [3, 4]],
        "losses": [0.1, 0.2],
        "sent": {"servers": 10},
        "held": {"parameters": 48},
        "applied": [[0, 1, 2, 3]],
        "pieces": [["w", [1, 0]]],
        "changes": [{"worker": 1, "attempt": 0, "step": 2, "version": 3, "there": False}],
    }
    _write(tmp_path, place(3), told, [shard])

    found = read_rank(tmp_path, 3)

    assert found.applied == [AppliedGradient(worker=0, step=1, read=2, version=3)]
    assert (found.samples, found.losses) == ({0: [1, 2], 1: [3, 4]}, {0: 0.1, 1: 0.2})
    lost = WorkerChange(worker=1, attempt=0, step=2, version=3, there=False)
    assert found.changes == [lost]
    (piece,) = found.pieces
    assert piece.region == (slice(1, 3), slice(0, 3))
    assert torch.equal(piece.values, values)


def test_a_rank_that_was_started_again_is_read_as_one(tmp_path: Path) -> None:
    """S07: the steps of both its starts; bytes are those of the last."""
    for attempt, first in enumerate((0, 5)):
        told = {
            "first": first,
            "samples": [[first], [first + 1]],
            "losses": [0.5, float(first)],
            "sent": {"servers": attempt},
            "held": {},
        }
        _write(tmp_path, place(1, attempt), told, ())

    found = read_rank(tmp_path, 1)

    assert found.samples == {0: [0], 1: [1], 5: [5], 6: [6]}
    assert found.losses == {0: 0.5, 1: 0.0, 5: 0.5, 6: 5.0}
    assert found.sent == {"servers": 1}
    assert (found.applied, found.pieces, found.changes) == ([], [], [])
