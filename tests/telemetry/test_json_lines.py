"""Lines survive kills: half a line is cut off, and what a rank wrote before is read again."""

from __future__ import annotations

import errno
import gzip
import random
from contextlib import closing
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError, EnvironmentProblem
from echelon.core.event import Event
from echelon.telemetry.events import EventWriter, events_files, ranks_with_events
from echelon.telemetry.json_lines import JsonLines, cut_half_line, read_entries
from tests.telemetry.runs import plain_events, read_events


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


def packed(*members: bytes) -> bytes:
    return b"".join(gzip.compress(member, mtime=0) for member in members)


def test_a_compressed_file_is_read_up_to_its_last_whole_member(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    with closing(JsonLines(path)) as lines:
        for value in (1, 2):
            lines.add({"a": value})
            assert lines.flush() == len(packed(b'{"a":%d}\n' % value))
            assert [entry.whole("a") for entry in read_entries(path)] == [*range(1, value + 1)]
        assert lines.flush() == 0
    assert gzip.decompress(path.read_bytes()) == b'{"a":1}\n{"a":2}\n'
    assert [entry.whole("a") for entry in read_entries(path)] == [1, 2]


@pytest.mark.parametrize("cut", [1, 5, 12, 20])
def test_half_a_member_is_not_read_and_is_cut_off_by_the_next_writer(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "x.jsonl.gz"
    whole, half = packed(b'{"a":1}\n{"a":2}\n'), packed(b'{"a":3}\n')
    path.write_bytes(whole + half[:cut])
    assert [entry.whole("a") for entry in read_entries(path)] == [1, 2]
    with closing(JsonLines(path)) as lines:
        lines.add({"a": 4})
    assert [entry.whole("a") for entry in read_entries(path)] == [1, 2, 4]


def test_a_member_may_be_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    rng = random.Random(0)
    with closing(JsonLines(path)) as lines:
        for _ in range(3):
            for _ in range(5000):
                lines.add({"a": rng.getrandbits(62), "b": rng.random()})
            lines.flush()
    assert path.stat().st_size > 3 * 65536
    entries = [*read_entries(path)]
    assert len(entries) == 15_000
    # From the place of one line to that of another.
    some = [*read_entries(path, entries[7000].place, entries[12_000].place)]
    assert [one.values for one in some] == [one.values for one in entries[7000:12_000]]


def test_a_damaged_member_is_said_and_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    first = packed(b'{"a":1}\n')
    path.write_bytes(first + b"\x00" * 30 + packed(b'{"a":2}\n'))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"gzip member at byte {len(first)} is damaged"):
        list(read_entries(path))
    JsonLines(path).close()
    assert path.read_bytes() == before


def test_a_bad_line_of_a_compressed_file_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(packed(b'{"a":1}\n{"a":2}\n', b'{"a":3}\n?\n'))
    with pytest.raises(ConfigError, match=r"x\.jsonl\.gz line 4: "):
        list(read_entries(path))


def test_a_member_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.telemetry.json_lines._LARGEST_MEMBER", 10_000)
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(packed(b" " * 100_000))
    with pytest.raises(ConfigError, match="more than 10000 bytes of text"):
        list(read_entries(path))


def test_a_run_that_an_earlier_version_began_goes_on_in_another_file(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    writer.record(Event(kind="F", name="before", start=1, end=2))
    writer.close()
    plain_events(tmp_path, 0)
    writer = EventWriter(tmp_path, 0)
    writer.record(Event(kind="F", name="after", start=1, end=2))
    writer.close()
    assert [path.name for path in events_files(tmp_path, 0)] == ["events.jsonl", "events.jsonl.gz"]
    names = [event.name for event in read_events(tmp_path, 0) if event.kind == "F"]
    assert names == ["before", "after"]
