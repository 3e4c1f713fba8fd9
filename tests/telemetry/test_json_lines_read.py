"""What a run left is read as it was written, or the file and the line that do not fit are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.errors import ConfigError
from echelon.telemetry.events import METRICS_FILE, ranks_with_events
from echelon.telemetry.json_lines import LogEntry, last_of_each_step, read_entries
from echelon.telemetry.observer import observe_rank
from echelon.telemetry.schedule_report import read_schedule_report
from echelon.telemetry.summary import summarize_run
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run
from tests.telemetry.runs import facts, make_job, make_run, plain_events, read_events

GOOD = b'{"kind":"start","steps":3}\n'
TIMES = stage_times(1.0, 1.0)


def _refused(read: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        read()
    (problem,) = error.value.problems
    assert problem.rule == "events-readable"
    return problem.message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"???", "Expecting value"),
        (b"", "Expecting value"),
        (b"[1]", "no object"),
        (b"{" * 60_000, "is no entry"),
        (b"[" * 60_000, "recursion"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is no entry"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD * 3 + line + b"\n" + GOOD)
    message = _refused(lambda: list(read_entries(path)))
    assert message.startswith(f"{path} line 4: ")
    assert why in message
    assert len(message) < len(str(path)) + 250
    # A part of a file counts its lines from the start of the file.
    assert f"{path} line 4: " in _refused(lambda: list(read_entries(path, len(GOOD) * 2)))


def test_a_value_that_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD + b'{"n":2,"x":1.5,"none":null,"t":"a","yes":true}\n')
    _, entry = read_entries(path)
    assert (entry.whole("n"), entry.number("n"), entry.number("x")) == (2, 2, 1.5)
    assert (entry.number("none"), entry.text("t")) == (None, "a")
    wrong: list[Callable[[], object]] = [
        lambda: entry.whole("step"),
        lambda: entry.whole("x"),
        lambda: entry.whole("yes"),
        lambda: entry.whole("none"),
        lambda: entry.number("t"),
        lambda: entry.number("yes"),
        lambda: entry.text("n"),
        lambda: entry.event(0),
    ]
    for read in wrong:
        assert _refused(read).startswith(f"{path} line 2: ")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"start": "now"}, "is no event"),
        ({"more": 1}, "is no event"),
        ({"start": 3.0}, "lasts from 3.0 s to 2.0 s"),
        ({"end": 1e308}, "lasts from 1.0 s to 1e+308 s"),
        ({"rank": 1}, "is an event of rank 1 in the file of rank 0"),
    ],
)
def test_an_event_that_no_rank_writes_is_refused(
    tmp_path: Path, change: dict[str, object], why: str
) -> None:
    values = {"kind": "F", "name": "F0.0", "start": 1.0, "end": 2.0, "rank": 0}
    good = LogEntry(path=tmp_path, place=0, values=values)
    assert good.event(0).end == 2.0
    bad = LogEntry(path=tmp_path, place=0, values=values | change)
    assert why in _refused(lambda: bad.event(0))


def test_a_file_that_does_not_open_is_named_and_one_that_is_not_there_is_empty(
    tmp_path: Path,
) -> None:
    assert list(read_entries(tmp_path / "none.jsonl")) == []
    assert _refused(lambda: list(read_entries(tmp_path))) == (
        f"{tmp_path}: it cannot be read: Is a directory"
    )


@pytest.mark.parametrize(
    "line",
    [
        "???\n",
        "[]\n",
        "{}\n",
        '{"kind":"step"}\n',
        '{"kind":"step","step":"2","tokens":1,"loss":1,"step_s":1}\n',
        '{"kind":"step","step":2,"mark":7,"tokens":null,"loss":1,"step_s":1}\n',
    ],
)
def test_a_bad_line_of_the_metrics_ends_no_command_with_a_traceback(
    tmp_path: Path, line: str
) -> None:
    run = write_run(tmp_path, plan_of(), [{1: TIMES}])
    metrics = run.path / METRICS_FILE
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0] + line)
    for read in (summarize_run, read_schedule_report):
        assert _refused(lambda read=read: read(run.path)).startswith(f"{metrics} line 2: ")


@pytest.mark.parametrize("name", [METRICS_FILE, "events.jsonl.gz", "events.rank-0001.jsonl.gz"])
def test_a_file_of_a_run_that_does_not_open_is_named(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path, plan_of(), [{1: TIMES}])
    path = run.path / name
    path.unlink()
    path.mkdir()
    assert _refused(lambda: read_schedule_report(run.path)).startswith(f"{path}: it cannot be read")


def test_a_line_that_is_no_event_is_named_by_its_number(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: TIMES, 2: TIMES}])
    path = plain_events(run.path, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if b'"kind":"F"' in line)
    lines[at] = lines[at].replace(b'"start":', b'"begin":')
    path.write_bytes(b"".join(lines))
    for read in (
        lambda: read_schedule_report(run.path, step=1),
        lambda: list(read_events(run.path, 1)),
    ):
        assert _refused(read).startswith(f"{path} line {at + 1}: is no event")


@pytest.mark.parametrize(
    "name", ["events.rank-0001 copy.jsonl", "events.rank-1.jsonl", "events.rank-00001.jsonl"]
)
def test_a_file_of_another_name_is_no_rank(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path, plan_of(), [{1: TIMES}])
    (run.path / name).write_bytes(plain_events(run.path, 1).read_bytes())
    assert ranks_with_events(run.path) == (0, 1)
    assert read_schedule_report(run.path).step == 1


def test_a_summary_counts_steps_that_took_no_time_and_losses_that_are_no_number(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    observer = observe_rank(make_job(), run.path, 0)
    observer.stepped(facts(1, loss=float("nan")))
    observer.close()
    metrics = run.path / METRICS_FILE
    metrics.write_text(metrics.read_text().replace('"step_s":0.5', '"step_s":0.0'))
    summary = summarize_run(run.path)
    assert (summary.steps, summary.first_loss) == (1, None)
    assert (summary.step_s, summary.tokens_per_s) == (0.0, None)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=5))
def test_each_step_counts_once_and_the_last_time_it_was_taken(
    sessions: list[tuple[int, int]],
) -> None:
    entries: list[LogEntry] = []
    expected: dict[int, int] = {}
    for session, (start, count) in enumerate(sessions):
        for step in range(start + 1, start + 1 + count):
            values = {"step": step, "session": session}
            entries.append(LogEntry(path=Path("x.jsonl"), place=0, values=values))
        expected = {step: who for step, who in expected.items() if step <= start}
        expected |= dict.fromkeys(range(start + 1, start + 1 + count), session)
    found = {entry.whole("step"): entry.whole("session") for entry in last_of_each_step(entries)}
    assert found == expected
    assert list(found) == sorted(found)
