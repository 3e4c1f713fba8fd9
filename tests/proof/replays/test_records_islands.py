"""What ranks write down at meetings is read again: of all starts of a rank, by steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from echelon.parallel.storage.weights import Shard
from echelon.proof.replays.records import VALUES, _MeetingNotes, read_records


def notes(folder: Path, rank: int, attempt: int) -> _MeetingNotes:
    """Return the notes of a rank that has one piece."""
    shard = Shard(
        name="head.weight",
        tensor=torch.full((2, 3), float(rank)),
        global_shape=(4, 3),
        offset=(2, 0),
        primary=True,
    )
    subject: Any = SimpleNamespace(
        met=lambda step: ([0, 1], [1] if attempt else [], 1),
        masters=lambda: {"head.weight": [shard]},
        step_parts=dict,
    )
    context: Any = SimpleNamespace(rank=rank, attempt=attempt)
    return _MeetingNotes(folder, context, subject)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    first = notes(tmp_path, 1, 0)
    report = SimpleNamespace(loss=2.5, samples=(4, 5), bytes_sent={"dp_replicate": 7, "tp": 3})
    for step in (0, 1):
        first.take(step, report)
    first.write(2)
    notes(tmp_path, 1, 1).write(4, came_in=True)
    notes(tmp_path, 0, 0).write(2)
    (tmp_path / "rank-0000-0-000004.part").write_text("half a record")

    found = read_records(tmp_path)
    assert [(one.step, one.rank, one.attempt) for one in found] == [(2, 0, 0), (2, 1, 0), (4, 1, 1)]
    one = found[1]
    assert (one.members, one.joins, one.tries, one.came_in) == ((0, 1), (), 1, False)
    assert (one.losses, one.samples, one.sent) == ({0: 2.5, 1: 2.5}, {0: [4, 5], 1: [4, 5]}, 14)
    (piece,) = one.pieces
    assert (piece.kind, piece.name) == (VALUES, "head.weight")
    assert piece.region == (slice(2, 4), slice(0, 3))
    assert piece.values.tolist() == [[1.0] * 3] * 2
    assert found[2].came_in
    assert found[2].losses == {}
