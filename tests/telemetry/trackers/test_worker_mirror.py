"""The loop of a mirror, with a tracker in memory: what it is given, when, and what is undone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from echelon.telemetry.trackers.progress import read_progress
from echelon.telemetry.trackers.tracker import Point, TrackedRun
from echelon.telemetry.trackers.worker import Mirror
from tests.telemetry.trackers.metrics import FIRST, SECOND, add_lines, expected_values, make_run


class InMemory:
    """Keep the runs of a tracker that can say what it has, and cannot forget."""

    rewinds = False

    def __init__(self) -> None:
        self.runs: dict[str, list[Point]] = {}
        self.now = ""
        self.fails_after: int | None = None

    def open(self, run: TrackedRun) -> str:
        self.now = run.name
        self.runs.setdefault(run.name, [])
        return run.name

    def recorded(self) -> int | None:
        return max((one.number for one in self.runs[self.now]), default=0)

    def rewind(self, step: int) -> None:
        raise AssertionError

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if self.fails_after == len(self.runs[self.now]):
                raise OSError("no connection")
            self.runs[self.now].append(point)

    def close(self) -> None:
        self.now = ""

    def values(self, name: str) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = {}
        for point in self.runs[name]:
            for key, value in point.values.items():
                assert point.step not in found.setdefault(key, {}), (key, point.step)
                found[key][point.step] = value
        return found


class Forgetful(InMemory):
    """Keep one run, of which it can forget the end, and say nothing of it."""

    rewinds = True

    def recorded(self) -> int | None:
        return None

    def rewind(self, step: int) -> None:
        kept = [one for one in self.runs[self.now] if one.step < step]
        self.runs[self.now] = kept


def _mirror(run: Path, tool: InMemory) -> Mirror:
    return Mirror(run, "mlflow", "echelon", lambda _: tool)


@pytest.mark.parametrize("kind", [InMemory, Forgetful])
def test_lines_are_mirrored_as_they_come(tmp_path: Path, kind: type[InMemory]) -> None:
    run, tool = make_run(tmp_path).path, kind()
    mirror, lines = _mirror(run, tool), (*FIRST, *SECOND)
    for number, line in enumerate(lines):
        add_lines(run, [line])
        mirror.look(final=False)
        # A start waits for the step that it goes on from.
        assert mirror.lines == number + (line["kind"] != "start")
    last = "nano" if tool.rewinds else "nano-2"
    assert tool.values(last) == expected_values(lines)
    assert list(tool.runs) == (["nano"] if tool.rewinds else ["nano", "nano-2"])
    if not tool.rewinds:
        assert tool.values("nano") == expected_values(FIRST), "what was there is left as it was"


@pytest.mark.parametrize("kind", [InMemory, Forgetful])
def test_an_old_run_is_mirrored_in_one_piece(tmp_path: Path, kind: type[InMemory]) -> None:
    run, tool, lines = make_run(tmp_path).path, kind(), (*FIRST, *SECOND)
    add_lines(run, lines)
    assert _mirror(run, tool).look(final=True) == len(lines)
    assert list(tool.runs) == ["nano"]
    assert tool.values("nano") == expected_values(lines)


@pytest.mark.parametrize("kind", [InMemory, Forgetful])
@pytest.mark.parametrize("fails_after", range(9))
def test_one_that_fails_half_way_goes_on_where_it_stopped(
    tmp_path: Path, kind: type[InMemory], fails_after: int
) -> None:
    run, tool, lines = make_run(tmp_path).path, kind(), (*FIRST, *SECOND)
    add_lines(run, FIRST)
    _mirror(run, tool).look(final=True)
    add_lines(run, SECOND)
    tool.fails_after = fails_after
    with suppress(OSError):
        _mirror(run, tool).look(final=True)
    tool.fails_after = None
    _mirror(run, tool).look(final=True)
    assert tool.values("nano" if tool.rewinds else "nano-2") == expected_values(lines)
    progress = read_progress(run, "mlflow")
    assert progress is not None
    assert progress.lines == len(lines)


def test_nothing_is_opened_for_a_run_without_a_line(tmp_path: Path) -> None:
    run, tool = make_run(tmp_path).path, InMemory()
    assert _mirror(run, tool).look(final=True) == 0
    assert tool.runs == {}
