"""Lines survive kills: half a line is cut off, and what a rank wrote before is read again."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

import pytest

from echelon.core.errors import EnvironmentProblem
from echelon.core.event import Event
from echelon.telemetry.events import EventWriter, ranks_with_events
from echelon.telemetry.json_lines import JsonLines, cut_half_line, read_entries
from tests.telemetry.runs import read_events


def test_lines_are_on_disk_after_flush_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with closing(JsonLines(path)) as lines:
        lines.add({"a": 1})
        assert path.read_text() == ""
        lines.flush()
        assert path.read_text() == '{"a":1}\n'
        lines.add({"a": float("nan"), "b": float("-inf"), "c": 1.5})
    values = [entry.values for entry in read_entries(path)]
    assert values == [{"a": 1}, {"a": None, "b": None, "c": 1.5}]


@pytest.mark.parametrize("half", [b"", b'{"a":', b'{"a": 3}', b"x" * 200_000])
def test_half_a_line_is_not_read_and_is_cut_off_by_the_next_writer(
    tmp_path: Path, half: bytes
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n' + half)
    assert [entry.whole("a") for entry in read_entries(path)] == [1, 2]
    with closing(JsonLines(path)) as lines:
        lines.add({"a": 3})
    assert [entry.whole("a") for entry in read_entries(path)] == [1, 2, 3]


def test_a_file_that_is_one_half_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"x" * 100_000)
    cut_half_line(path)
    assert path.read_bytes() == b""
    assert list(read_entries(tmp_path / "none.jsonl")) == []


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    lines = JsonLines(tmp_path / "x.jsonl")
    lines._file.close()
    lines._file = full.open("wb", buffering=0)
    lines.add({"a": 1})
    with pytest.raises(EnvironmentProblem) as caught:
        lines.flush()
    assert caught.value.rules == ("disk-space",)
    lines.close()


def test_events_of_ranks_and_of_two_starts(tmp_path: Path) -> None:
    sent = [
        Event(
            kind="all_reduce", name="bucket 0", axis="dp", bytes=128, start=0.5, end=0.75, rank=1
        ),
        Event(kind="F", name="F0.1", stage=0, microbatch=1, start=1, end=2, rank=1),
    ]
    for _ in range(2):
        writer = EventWriter(tmp_path, rank=1)
        for event in sent:
            writer.record(event)
        writer.flush()
        writer.close()
    EventWriter(tmp_path, rank=0).close()
    found = list(read_events(tmp_path, rank=1))
    assert [event.kind for event in found] == ["start", "all_reduce", "F"] * 2
    assert found[1:3] == found[4:6] == sent
    assert ranks_with_events(tmp_path) == (0, 1)
    assert [event.kind for event in read_events(tmp_path, rank=0)] == ["start"]


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="No such file") as caught:
        EventWriter(tmp_path / "gone", rank=0)
    assert caught.value.rules == ("disk-works",)
    assert errno.ENOENT == 2
