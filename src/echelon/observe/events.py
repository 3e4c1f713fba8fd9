"""events.jsonl: what a rank sent and ran, one `Event` to a line.

Rank 0 writes events.jsonl and rank 1 events.rank-0001.jsonl: ranks on several machines cannot
append to one file. Each start of a run begins with an event of kind "start" whose name is the time
of day; the seconds of the events that follow count from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from echelon.core.event import Event
from echelon.core.serialize import from_json
from echelon.observe.json_lines import JsonLines, read_json_lines

START = "start"


def events_path(run_dir: Path, rank: int) -> Path:
    """Return where a rank writes its events."""
    return run_dir / ("events.jsonl" if rank == 0 else f"events.rank-{rank:04d}.jsonl")


class EventWriter:
    """Take the events of one rank; they are written by `flush`, once per step."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Open the file of `rank` to append to it, and note the start."""
        self._lines = JsonLines(events_path(run_dir, rank))
        self._pending: list[Event] = []
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.record(Event(kind=START, name=now, rank=rank))

    def record(self, event: Event) -> None:
        """Take one event; cheap, because it happens within a step."""
        self._pending.append(event)

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


def read_events(run_dir: Path, rank: int) -> Iterator[Event]:
    """Yield the events of a rank, in the order in which they were written."""
    for entry in read_json_lines(events_path(run_dir, rank)):
        yield from_json(Event, entry)


def ranks_with_events(run_dir: Path) -> tuple[int, ...]:
    """Return the ranks that wrote events, in order."""
    others = run_dir.glob("events.rank-*.jsonl")
    found = [int(path.name.removeprefix("events.rank-").removesuffix(".jsonl")) for path in others]
    return tuple(sorted([*found, *([0] if events_path(run_dir, 0).is_file() else [])]))
