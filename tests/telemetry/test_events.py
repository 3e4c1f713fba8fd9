"""events.jsonl.gz: a file for each rank, a start, and marks that no two steps share."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.core.event import Event
from echelon.telemetry.events import (
    WARM_UP,
    EventWriter,
    StepSampler,
    events_path,
    ranks_with_events,
    step_mark,
)
from tests.telemetry.runs import make_job, read_events


def unpacked(run_dir: Path, rank: int) -> list[dict[str, object]]:
    """Return the lines of a file of events, as a reader without Echelon reads it."""
    text = gzip.decompress(events_path(run_dir, rank).read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def test_each_rank_has_a_file_and_other_names_are_none_of_theirs(tmp_path: Path) -> None:
    assert events_path(tmp_path, 0).name == "events.jsonl.gz"
    assert events_path(tmp_path, 12).name == "events.rank-0012.jsonl.gz"
    assert ranks_with_events(tmp_path) == ()
    for rank in (12, 3, 12345):
        events_path(tmp_path, rank).touch()
    for name in ("events.rank-03.jsonl", "events.rank-0004.jsonl.zst", "events.rank-x.jsonl.gz"):
        (tmp_path / name).touch()
    assert ranks_with_events(tmp_path) == (3, 12, 12345)
    (tmp_path / "events.rank-0005.jsonl").touch()  # of an earlier version
    assert ranks_with_events(tmp_path) == (3, 5, 12, 12345)
    events_path(tmp_path, 0).touch()
    assert ranks_with_events(tmp_path) == (0, 3, 5, 12, 12345)


def test_a_mark_names_one_step_that_was_taken_once() -> None:
    first = step_mark(7, (0.125, 0.0))
    assert first == step_mark(7, (0.125, 0.0))
    assert first.split()[0] == "7"
    assert len({first, step_mark(8, (0.125, 0.0)), step_mark(7, (0.0, 0.125))}) == 3


def test_events_are_written_with_their_step_and_each_start_is_told(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 1)
    event = Event(kind="F", name="F0.0", rank=1, stage=0, microbatch=0, start=0.5, end=0.75)
    writer.record(event)
    assert len(unpacked(tmp_path, 1)) == 1
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


def test_seconds_are_written_to_a_tenth_of_a_microsecond(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    writer.record(Event(kind="F", name="F0.0", start=1 / 3, end=2 / 3, waited_s=1e-9))
    writer.close()
    last = unpacked(tmp_path, 0)[-1]
    assert (last["start"], last["end"], last["waited_s"]) == (0.3333333, 0.6666667, 0.0)


def test_each_step_is_a_gzip_member_that_zcat_reads(tmp_path: Path) -> None:
    write_steps(tmp_path, 3).close()
    path = events_path(tmp_path, 0)
    assert path.read_bytes().count(b"\x1f\x8b\x08") == 4  # the start, and three steps
    if zcat := shutil.which("zcat"):
        text = subprocess.run([zcat, path], capture_output=True, check=True).stdout
        assert [json.loads(line) for line in text.splitlines()] == unpacked(tmp_path, 0)


def write_steps(
    run_dir: Path, steps: int, *, sampler: StepSampler | None = None, first: int = 1
) -> EventWriter:
    """Write the events of steps as a run of a rank does, and leave its file open."""
    writer, rng = EventWriter(run_dir, 0, sampler), random.Random(first)
    for step in range(first, first + steps):
        begin = step + rng.random()
        writer.record(Event(kind="load", name="batch", start=begin, end=begin))
        for index in range(20):
            end = begin + rng.random()
            writer.record(
                Event(kind="F", name=f"F0.{index}", start=begin, end=end, bytes=rng.randrange(9999))
            )
            begin = end
        writer.end_step(f"{step} mark", step)
    return writer


def steps_of(run_dir: Path) -> list[int]:
    marks = [event.name for event in read_events(run_dir, 0) if event.kind == "step"]
    return [int(mark.split()[0]) for mark in marks]


@pytest.mark.parametrize("budget", [60_000, 200_000])
def test_events_of_a_long_run_stay_within_their_budget(tmp_path: Path, budget: int) -> None:
    sampler = StepSampler(budget_bytes=budget, last_step=2000, periods=(500,))
    write_steps(tmp_path, 2000, sampler=sampler).close()
    written = events_path(tmp_path, 0).stat().st_size
    assert budget / 3 < written <= budget
    assert written == sampler.used_bytes
    kept = steps_of(tmp_path)
    assert kept[:8] == [*range(1, 9)]
    assert {500, 1000, 1500, 2000} <= {*kept}
    others = [step for step in kept[8:] if step % 500]
    assert {step % 4 for step in others} == {0}
    said = [event.name for event in read_events(tmp_path, 0) if event.kind == "sampled"]
    assert said[0].startswith("1 step of ")
    assert said[0].endswith(" from step 9 on")
    # A step is there whole, or not at all.
    assert sum(event.kind == "F" for event in read_events(tmp_path, 0)) == 20 * len(kept)


def test_a_run_that_is_stopped_keeps_its_last_step_and_what_was_under_way(tmp_path: Path) -> None:
    sampler = StepSampler(budget_bytes=20_000, last_step=10**6)
    writer = write_steps(tmp_path, 1023, sampler=sampler)
    assert 1023 not in steps_of(tmp_path)
    writer.record(Event(kind="load", name="of the step that failed"))
    writer.close()
    assert steps_of(tmp_path)[-1] == 1023
    assert unpacked(tmp_path, 0)[-1]["name"] == "of the step that failed"


def test_news_of_other_ranks_is_kept_of_steps_that_are_left_out(tmp_path: Path) -> None:
    sampler = StepSampler(budget_bytes=20_000, last_step=10**6)
    writer = write_steps(tmp_path, 1022, sampler=sampler)
    writer.record(Event(kind="lost", name="worker 3"))
    writer.end_step("1023 mark", 1023)
    assert unpacked(tmp_path, 0)[-1]["name"] == "worker 3"
    assert 1023 not in steps_of(tmp_path)
    writer.close()


def test_a_validation_after_a_step_that_is_left_out_is_left_out(tmp_path: Path) -> None:
    sampler = StepSampler(budget_bytes=20_000, last_step=10**6)
    writer = write_steps(tmp_path, 1023, sampler=sampler)
    before = events_path(tmp_path, 0).stat().st_size
    writer.record(Event(kind="F", name="of a validation"))
    writer.flush()
    assert events_path(tmp_path, 0).stat().st_size == before
    writer.close()


def test_a_resumed_run_counts_what_is_there_already(tmp_path: Path) -> None:
    budget = 60_000
    first = StepSampler(budget_bytes=budget, last_step=400)
    write_steps(tmp_path, 400, sampler=first).close()
    there = events_path(tmp_path, 0).stat().st_size
    again = StepSampler(budget_bytes=budget, last_step=4000, used_bytes=there)
    write_steps(tmp_path, 3600, sampler=again, first=401).close()
    assert events_path(tmp_path, 0).stat().st_size <= budget
    assert steps_of(tmp_path)[-1] == 4000


def kept_steps(sampler: StepSampler, size: int, first: int = 1) -> list[int]:
    """Return the steps that a rank writes whose steps take `size` bytes each."""
    found: list[int] = []
    for step in range(first, sampler.last_step + 1):
        if sampler.keeps(step):
            sampler.wrote(size)
            found.append(step)
    return found


def test_all_steps_are_kept_where_they_fit() -> None:
    sampler = StepSampler(budget_bytes=1100, last_step=100)
    assert kept_steps(sampler, 10) == [*range(1, 101)]
    assert sampler.says() == "every step"


@pytest.mark.parametrize("steps", [50, 217, 10_000])
@pytest.mark.parametrize("room", [12, 40, 1000])
def test_the_budget_holds_and_is_used(steps: int, room: int) -> None:
    sampler = StepSampler(budget_bytes=10 * room, last_step=steps)
    kept = kept_steps(sampler, 10)
    assert len(kept) <= room
    assert len(kept) >= min(steps, room // 2)
    assert kept[: min(steps, WARM_UP)] == [*range(1, 1 + min(steps, WARM_UP))]
    assert kept[-1] == steps


def test_steps_of_a_rank_with_fewer_are_those_of_the_others_too() -> None:
    ranks = [StepSampler(budget_bytes=5000, last_step=3000) for _ in range(3)]
    small, middle, large = (
        {*kept_steps(rank, size)} for rank, size in zip(ranks, (11, 37, 90), strict=True)
    )
    assert large < middle < small


def test_steps_that_save_or_validate_are_kept_while_there_is_room() -> None:
    sampler = StepSampler(budget_bytes=2000, last_step=10_000, periods=(100, 250))
    kept = {*kept_steps(sampler, 10)}
    assert {*range(100, 10_001, 100), *range(250, 10_001, 250)} <= kept
    assert len(kept) <= 200


def test_a_run_that_saves_each_step_stays_within_its_budget() -> None:
    sampler = StepSampler(budget_bytes=1000, last_step=10_000, periods=(1,))
    kept = kept_steps(sampler, 10)
    assert 40 <= len(kept) <= 100
    assert kept[-1] == 10_000


def test_rounds_are_kept_whole() -> None:
    sampler = StepSampler(budget_bytes=3000, last_step=1000, round_steps=10)
    kept = kept_steps(sampler, 10)
    rounds = {(step - 1) // 10 for step in kept}
    assert kept == [10 * one + step for one in sorted(rounds) for step in range(1, 11)]
    assert len(kept) <= 300
    assert sampler.says() == f"1 round of 10 steps of {sampler.stride}"


def test_a_budget_for_next_to_nothing_leaves_the_first_and_the_last_step() -> None:
    assert kept_steps(StepSampler(budget_bytes=1, last_step=100), 10) == [1, 100]


def test_a_start_begins_with_a_warm_up_of_its_own() -> None:
    sampler = StepSampler(budget_bytes=1000, last_step=5000, used_bytes=500)
    kept = kept_steps(sampler, 10, first=3001)
    assert kept[:WARM_UP] == [*range(3001, 3001 + WARM_UP)]
    assert sampler.used_bytes <= 1000


def test_a_job_says_the_budget_of_a_rank_and_what_is_special() -> None:
    job = make_job(steps=90)
    sampler = StepSampler.of_job(replace(job, checkpoint=replace(job.checkpoint, every=30)), 7)
    assert sampler.budget_bytes == 50e6 / job.plan.mesh.world_size
    assert sampler.periods[0] == 30
    assert (sampler.last_step, sampler.used_bytes, sampler.round_steps) == (90, 7, 1)
    settings = ("mesh.dp_replicate=2", "local_sgd.every=5", "observe.events_budget_bytes=2 MB")
    islands = StepSampler.of_job(load_job("nano", settings), 0)
    assert (islands.budget_bytes, islands.round_steps) == (1e6, 5)
