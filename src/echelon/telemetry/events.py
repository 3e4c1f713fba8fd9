"""events.jsonl: what a rank sent and ran, one `Event` to a line.

Rank 0 writes events.jsonl and rank 1 events.rank-0001.jsonl: ranks on several machines cannot
append to one file. Each start of a run begins with an event of kind "start" whose name is the time
of day; the seconds of the events that follow count from there. A step ends with an event of kind
"step" whose name, its mark, is the same in the files of all ranks and in metrics.jsonl.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from echelon.core.event import Event
from echelon.core.serialize import content_hash
from echelon.telemetry.json_lines import JsonLines

START, STEP = "start", "step"
METRICS_FILE = "metrics.jsonl"
"""What rank 0 writes of every step, with the same marks."""

_OF_A_RANK = re.compile(r"events\.rank-(\d{4,})\.jsonl", re.ASCII)


def events_path(run_dir: Path, rank: int) -> Path:
    """Return where a rank writes its events."""
    return run_dir / ("events.jsonl" if rank == 0 else f"events.rank-{rank:04d}.jsonl")


def step_mark(number: int, rank_waits_s: Sequence[float]) -> str:
    """Return what all ranks call a step that was taken once, and no other: ``12 5f0c...``.

    Starts of a run may take the same step again, and a rank that was killed early may not have
    written that it started, so the places of steps in files do not tell them apart. How long each
    rank has waited, which all ranks learn at the end of a step, is never the same twice.
    """
    return f"{number} {content_hash([number, *rank_waits_s])}"


class EventWriter:
    """Take the events of one rank; they are written by `end_step` and `flush`, once per step."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Open the file of `rank` to append to it, and write down the start."""
        self._rank = rank
        self._lines = JsonLines(events_path(run_dir, rank))
        self._pending: list[Event] = []
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.record(Event(kind=START, name=now, rank=rank))
        self.flush()

    def record(self, event: Event) -> None:
        """Take one event; cheap, because it happens within a step."""
        self._pending.append(event)

    def end_step(self, mark: str) -> None:
        """Write the events of a step, the last of which says that it ends here."""
        self.record(Event(kind=STEP, name=mark, rank=self._rank))
        self.flush()

    def flush(self) -> None:
        """Write the events that were taken since the last time."""
        for event in self._pending:
            self._lines.add(event.to_json())
        self._pending.clear()
        self._lines.flush()

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        self._lines.close()


def ranks_with_events(run_dir: Path) -> tuple[int, ...]:
    """Return the ranks that wrote events, in order; a file of another name is none of theirs."""
    named = (_OF_A_RANK.fullmatch(path.name) for path in run_dir.glob("events.rank-*.jsonl"))
    ranks = {0, *(int(found[1]) for found in named if found is not None)}
    return tuple(rank for rank in sorted(ranks) if events_path(run_dir, rank).exists())
