# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases: an offline folder of the run, or its server where WANDB_MODE says online.

`wandb sync` sends an offline folder later. Its own count of rows is the line of metrics.jsonl, so
that folders of one run never claim the same row; the axis of every chart is `step`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from echelon.core.optional import optional_package
from echelon.telemetry.trackers.tracker import ENTRY, Point, TrackedRun, Tracker

STEP_AXIS = "step"
_HEADER_BYTES = 7  # of a file
_BLOCK_BYTES = 32768  # of a block
_CHUNK_HEADER = struct.Struct("<IHB")
_FULL = 1  # kind of a chunk that is a whole record
_LAST = 4  # kind of a chunk that ends one


class WeightsAndBiases(Tracker):
    """Write rows of numbers and texts."""

    def __init__(self) -> None:
        """Import it."""
        purpose = "mirroring a run in Weights & Biases"
        self._wandb: Any = optional_package("wandb", extra="wandb", purpose=purpose)
        self._run: Any = None
        self._first = True

    def open(self, run: TrackedRun) -> str:
        """Begin a run, or go on with it: offline that is a folder more, of the same id."""
        self._first = not run.id
        settings = self._wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = self._wandb.init(
            project=run.project,
            name=run.name,
            group=run.group,
            id=run.id or uuid4().hex[:8],
            resume="allow",
            config=dict(run.config),
            settings=settings,
        )
        self._run.define_metric(STEP_AXIS, hidden=True)
        self._run.define_metric("*", step_metric=STEP_AXIS)
        return self._run.id

    def recorded(self) -> int | None:
        """Return the largest line number of its offline folders; None where they are not offline.

        What a process had not written when it was killed is not among it.
        """
        if not self._run.offline or self._first:
            return 0 if self._first else None
        numbers = [0]
        for path in offline_files(Path(self._run.dir).parents[1], self._run.id):
            numbers += [int(row[ENTRY]) for row in offline_rows(path) if ENTRY in row]
        return max(numbers)

    def write(self, points: Sequence[Point]) -> None:
        """Write rows; its own process writes them out."""
        for point in points:
            row = {STEP_AXIS: point.step, **point.numbers(), **point.texts}
            self._run.log(row, step=point.number, commit=True)

    def close(self) -> None:
        """End the run, with all rows written; opened again, it goes on."""
        self._run.finish()


def offline_files(folder: Path, run_id: str) -> list[Path]:
    """Return the files of the offline folders of a run, the oldest first."""
    return sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))


def offline_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, as far as it is whole."""
    for row in offline_records(path):
        if row.WhichOneof("record_type") == "history":
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in row.history.item
            }


def offline_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file: blocks of chunks in the format of LevelDB's log."""
    proto: Any = optional_package(
        "wandb.proto.wandb_internal_pb2", extra="wandb", purpose=f"reading {path}"
    )
    data, place, parts = path.read_bytes(), _HEADER_BYTES, list[bytes]()
    while place < len(data):
        room = _BLOCK_BYTES - place % _BLOCK_BYTES
        if room < _CHUNK_HEADER.size:
            place += room
            continue
        if place + _CHUNK_HEADER.size > len(data):
            return
        _, length, kind = _CHUNK_HEADER.unpack_from(data, place)
        place += _CHUNK_HEADER.size
        if kind == 0 or place + length > len(data):
            return
        parts.append(data[place : place + length])
        place += length
        if kind in (_FULL, _LAST):
            record = proto.Record()
            record.ParseFromString(b"".join(parts))
            yield record
            parts = []
