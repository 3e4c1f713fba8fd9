# SPDX-License-Identifier: Apache-2.0
"""trackio: a database of the run, or where TRACKIO_DIR says; one row for each line.

Its own calls never raise: what they could not write is found by reading the last row back.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from echelon.core.optional import optional_package
from echelon.telemetry.trackers.tracker import ENTRY, Point, TrackedRun, Tracker

_WRITTEN_WITHIN_S = 60.0  # s; it writes twice a second


class Trackio(Tracker):
    """Write rows of numbers and texts."""

    def __init__(self) -> None:
        """Import it."""
        purpose = "mirroring a run in trackio"
        self._trackio: Any = optional_package("trackio", extra="trackio", purpose=purpose)
        storage: Any = optional_package("trackio.sqlite_storage", extra="trackio", purpose=purpose)
        self._storage = storage.SQLiteStorage
        self._run: Any = None

    def open(self, run: TrackedRun) -> str:
        """Begin the run of this name, or go on with it."""
        self._run = self._trackio.init(
            run.project,
            name=run.name,
            group=run.group,
            config=dict(run.config),
            resume="allow" if run.id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return run.name

    def recorded(self) -> int | None:
        """Return the largest line number of its rows; None where they are on a server."""
        return None if self._run.url is not None else max(self._numbers(), default=0)

    def write(self, points: Sequence[Point]) -> None:
        """Write rows, and wait until the last one can be read back."""
        for point in points:
            self._run.log({**point.numbers(), **point.texts}, step=point.step)
        if not points or self._run.url is not None:
            return
        last, end = points[-1], time.monotonic() + _WRITTEN_WITHIN_S
        while last.number not in self._numbers(step=last.step):
            if time.monotonic() > end:
                raise OSError(f"trackio has not written line {last.number}")
            time.sleep(0.1)

    def close(self) -> None:
        """End the run; opened again, it goes on."""
        self._trackio.finish()

    def _numbers(self, step: int | None = None) -> list[int]:
        """Return the line numbers of its rows, of all or of one step."""
        try:
            rows = self._storage.get_metric_values(
                self._run.project, self._run.name, ENTRY, step=step, run_id=self._run.id
            )
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # It makes its tables after the file of the database.
                return []
            raise
        return [int(row["value"]) for row in rows]
