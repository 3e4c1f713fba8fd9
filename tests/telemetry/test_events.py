"""events.jsonl: a file for each rank, a start, and marks that no two steps share."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from echelon.core.event import Event
from echelon.telemetry.events import EventWriter, events_path, ranks_with_events, step_mark
from tests.telemetry.runs import read_events


def test_each_rank_has_a_file_and_other_names_are_none_of_theirs(tmp_path: Path) -> None:
    assert events_path(tmp_path, 0).name == "events.jsonl"
    assert events_path(tmp_path, 12).name == "events.rank-0012.jsonl"
    assert ranks_with_events(tmp_path) == ()
    for rank in (12, 3, 12345):
        events_path(tmp_path, rank).touch()
    for name in ("events.rank-03.jsonl", "events.rank-0004.jsonl.gz", "events.rank-x.jsonl"):
        (tmp_path / name).touch()
    assert ranks_with_events(tmp_path) == (3, 12, 12345)
    events_path(tmp_path, 0).touch()
    assert ranks_with_events(tmp_path) == (0, 3, 12, 12345)


def test_a_mark_names_one_step_that_was_taken_once() -> None:
    first = step_mark(7, (0.125, 0.0))
    assert first == step_mark(7, (0.125, 0.0))
    assert first.split()[0] == "7"
    assert len({first, step_mark(8, (0.125, 0.0)), step_mark(7, (0.0, 0.125))}) == 3


def test_events_are_written_with_their_step_and_each_start_is_told(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 1)
    event = Event(kind="F", name="F0.0", rank=1, stage=0, microbatch=0, start=0.5, end=0.75)
    writer.record(event)
    assert len(events_path(tmp_path, 1).read_text().splitlines()) == 1
    writer.end_step("1 abc")
    writer.record(event)
    writer.close()
    start, written, step, last = read_events(tmp_path, 1)
    assert start.kind == "start"
    assert datetime.fromisoformat(start.name).utcoffset() is not None
    assert written == last == event
    assert (step.kind, step.name, step.rank) == ("step", "1 abc", 1)
    EventWriter(tmp_path, 1).close()
    assert [one.kind for one in read_events(tmp_path, 1)].count("start") == 2
