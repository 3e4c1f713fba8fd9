# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files, written without TensorFlow or PyTorch.

A scalar of an event file has 32 bits: what is read back is the number of metrics.jsonl rounded to
fp32. Steps that are taken again are undone as TensorBoard does itself: an event of a new session
says from which step on all that came before is void.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from echelon.core.optional import optional_package
from echelon.telemetry.trackers.tracker import Point, TrackedRun, Tracker


class TensorBoard(Tracker):
    """Write event files."""

    rewinds = True

    def __init__(self) -> None:
        """Import what writes them."""
        purpose = "mirroring a run in TensorBoard"

        def module(name: str) -> Any:
            return optional_package(f"tensorboard.{name}", extra="tensorboard", purpose=purpose)

        self._files = module("summary.writer.event_file_writer")
        self._event = module("compat.proto.event_pb2")
        self._summary = module("compat.proto.summary_pb2")
        self._tensor = module("compat.proto.tensor_pb2")
        self._types = module("compat.proto.types_pb2")
        self._text = module("plugins.text.metadata")
        self._writer: Any = None

    def open(self, run: TrackedRun) -> str:
        """Begin a file; the first one starts with the settings of the run."""
        run.folder.mkdir(parents=True, exist_ok=True)
        self._writer = self._files.EventFileWriter(str(run.folder))
        if not run.id:
            # As a table in Markdown, which the text page of TensorBoard draws.
            rows = [f"| {key} | {json.dumps(value)} |" for key, value in run.config.items()]
            table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
            self._add_text("config", table, 0, time.time())
            self._writer.flush()
        return run.name

    def recorded(self) -> int | None:
        """Return None: event files are long to read, and what is in doubt is written again."""
        return None

    def rewind(self, step: int) -> None:
        """Say that a session starts, by which all from `step` on is void."""
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, session_log=log))

    def write(self, points: Sequence[Point]) -> None:
        """Write scalars and texts, and flush them."""
        for point in points:
            if numbers := point.values:
                summary = self._summary.Summary(
                    value=[
                        self._summary.Summary.Value(tag=name, simple_value=value)
                        for name, value in numbers.items()
                    ]
                )
                event = self._event.Event(wall_time=point.time_s, step=point.step, summary=summary)
                self._writer.add_event(event)
            for name, text in point.texts.items():
                self._add_text(name, text, point.step, point.time_s)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add_text(self, name: str, text: str, step: int, time_s: float) -> None:
        tensor = self._tensor.TensorProto(
            dtype=self._types.DT_STRING, string_val=[text.encode()], tensor_shape={}
        )
        value = self._summary.Summary.Value(
            tag=name, metadata=self._text.create_summary_metadata(name, ""), tensor=tensor
        )
        summary = self._summary.Summary(value=[value])
        self._writer.add_event(self._event.Event(wall_time=time_s, step=step, summary=summary))
