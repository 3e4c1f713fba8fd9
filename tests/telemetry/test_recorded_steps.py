"""Each step is found in each rank's file by its mark, whatever kills left out of any of them."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.telemetry.events import METRICS_FILE, EventWriter, step_mark
from echelon.telemetry.observer import observe_rank
from echelon.telemetry.recorded_steps import RecordedSteps
from echelon.telemetry.schedule_report import read_schedule_report
from echelon.telemetry.summary import summarize_run
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run
from tests.telemetry.runs import facts, make_job, make_run, plain_events, read_events
from tests.walks import examples

SLOW, FAST = stage_times(2.0, 2.0), stage_times(1.0, 1.0)


def _forward_s(steps: RecordedSteps, number: int) -> list[float]:
    """Return what a forward pass of a step took on each rank."""
    found = steps.read(number).events
    passes = (next(event for event in found[rank] if event.kind == "F") for rank in sorted(found))
    return [event.end - event.start for event in passes]


@pytest.mark.parametrize("silent", [(), (0,), (1,), (0, 1)])
def test_a_start_that_was_killed_early_moves_no_step(
    tmp_path: Path, silent: tuple[int, ...]
) -> None:
    starts = [{1: SLOW, 2: SLOW}, {}, {2: FAST, 3: FAST}]
    run = write_run(tmp_path, plan_of(), starts, silent=[(), silent])
    steps = RecordedSteps(run.path, [0, 1])
    assert steps.numbers == (1, 2, 3)
    assert [_forward_s(steps, number) for number in steps.numbers] == [[2, 2], [1, 1], [1, 1]]
    report = read_schedule_report(run.path)
    assert (report.step, sorted(report.measured)) == (3, [2, 3])
    assert report.durations.forward_s == pytest.approx((1.0, 1.0))
    assert sorted(read_schedule_report(run.path, step=1).measured) == [1]


def test_a_start_that_only_one_of_both_files_knows_moves_no_step(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: SLOW}, {2: FAST}])
    metrics = run.path / METRICS_FILE
    metrics.write_text('{"kind":"start","steps":2}\n' + metrics.read_text())
    EventWriter(run.path, 1).close()
    steps = RecordedSteps(run.path, [0, 1])
    assert [_forward_s(steps, number) for number in steps.numbers] == [[2, 2], [1, 1]]


@st.composite
def _histories(draw: st.DrawFn) -> list[tuple[int, int, Collection[int]]]:
    """Draw starts of a run: the first step, how many it took, and the ranks that wrote nothing."""
    some = st.tuples(st.integers(1, 4), st.integers(0, 3), st.sets(st.integers(0, 1)))
    return draw(st.lists(some, min_size=1, max_size=4))


@given(_histories())
@settings(deadline=None, max_examples=examples(25))
def test_a_step_is_the_one_taken_last_or_is_not_there(
    history: Sequence[tuple[int, int, Collection[int]]],
) -> None:
    starts = [
        {number: stage_times(1.0 + at, 1.0 + at) for number in range(first, first + count)}
        for at, (first, count, _) in enumerate(history)
    ]
    expected: dict[int, int] = {}
    for at, start in enumerate(starts):
        for number in start:
            expected = {step: when for step, when in expected.items() if step < number}
            expected[number] = at
    there = {step: at for step, at in expected.items() if not history[at][2]}
    with TemporaryDirectory() as folder:
        # Before them a start of which every rank wrote down that it was: each has a file.
        silent = [(), *(ranks for _, _, ranks in history)]
        plan = plan_of("batch.global_sequences=4")
        run = write_run(Path(folder), plan, [{}, *starts], silent=silent)
        steps = RecordedSteps(run.path, [0, 1])
        assert {step.number: step.start - 1 for step in steps.taken} == expected
        assert steps.numbers == tuple(sorted(there))
        for number, at in there.items():
            assert steps.read(number).start == at + 1
            assert _forward_s(steps, number) == [1.0 + at, 1.0 + at]


def test_a_rank_writes_that_it_started_before_anything_else(tmp_path: Path) -> None:
    run, job = make_run(tmp_path), make_job()
    for rank in (0, 1):
        observer = observe_rank(job, run.path, rank)
        # A kill at this point, before anything is flushed or closed, leaves this much.
        assert [event.kind for event in read_events(run.path, rank)] == ["start"]
        observer.close()


def test_all_ranks_and_the_metrics_give_a_step_one_mark(tmp_path: Path) -> None:
    run, job = make_run(tmp_path), make_job()
    killed, *ranks = [observe_rank(job, run.path, rank) for rank in (0, 0, 1)]
    for number in (1, 2):
        for rank, observer in enumerate(ranks):
            # What ranks know of a step differs in what each of them took for it.
            told = replace(facts(number), rank_waits_s=(0.1, number / 7), step_s=1.0 + rank)
            for kind, start in (("load", number), ("F", number + 0.5)):
                event = Event(kind=kind, name=kind, start=start, end=start, rank=rank)
                observer.sink.record(event)
            observer.stepped(told)
    for observer in (killed, *ranks):
        observer.close()
    steps = RecordedSteps(run.path, [0, 1])
    assert steps.numbers == (1, 2)
    assert [step.mark for step in steps.taken] == [
        step_mark(1, (0.1, 1 / 7)),
        *(step_mark(2, (0.1, 2 / 7)),),
    ]
    for number in steps.numbers:
        found = steps.read(number).events
        assert [event.start for event in found[1]] == [number, number + 0.5]


def test_half_a_mark_and_a_quoted_one_end_no_step(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: SLOW, 2: SLOW}])
    path = plain_events(run.path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert RecordedSteps(run.path, [0, 1]).numbers == (1,)
    mark = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole[: -len(mark)] + b" " + mark)
    assert RecordedSteps(run.path, [0, 1]).numbers == (1,)


def test_a_run_that_was_recorded_without_marks_is_refused_and_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: SLOW, 2: SLOW}])
    metrics = run.path / METRICS_FILE
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        line.pop("mark", None)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (None, 1):
        with pytest.raises(ConfigError, match="an earlier version of Echelon") as error:
            read_schedule_report(run.path, step=step)
        assert error.value.rules == ("step-recorded",)


def test_ranks_that_leave_steps_out_have_the_same_ones(tmp_path: Path) -> None:
    run, job = make_run(tmp_path), make_job(steps=600)
    job = replace(job, observe=replace(job.observe, events_budget_bytes=30_000))
    observers = [observe_rank(job, run.path, rank) for rank in (0, 1)]
    rng = random.Random(0)
    for number in range(1, 601):
        waits_s = (rng.random(), rng.random())
        for rank, observer in enumerate(observers):
            for kind in ("load", *["F"] * (5 + 10 * rank)):
                start = number + rng.random()
                event = Event(kind=kind, name=kind, start=start, end=start, rank=rank)
                observer.sink.record(event)
            observer.stepped(replace(facts(number), rank_waits_s=waits_s))
    for observer in observers:
        observer.close()
    assert sum(path.stat().st_size for path in run.path.glob("events*")) <= 2 * 30_000
    both, first, second = (RecordedSteps(run.path, ranks) for ranks in ([0, 1], [0], [1]))
    assert both.numbers == second.numbers
    assert {*second.numbers} < {*first.numbers}
    assert both.numbers[:8] == (1, 2, 3, 4, 5, 6, 7, 8)
    assert both.numbers[-1] == 600
    assert len(both.read(600).events[1]) == 16
    assert both.says().startswith(f"{len(both.numbers)} of 600: steps 1 to 8, ")
    assert summarize_run(run.path).recorded == first.says()
