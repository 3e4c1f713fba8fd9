"""Settings of the pipeline: schedules by name, from a file, by search; stages balanced by times."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.schedule.build import SCHEDULES
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from tests.config.measured import times_file
from tests.config.problems import problems_of, write
from tests.config.schedule_files import DEEP, csv, from_file, rows_of
from tests.config.suggestions import taken


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_schedule_is_a_plan(name: str) -> None:
    builder = SCHEDULES[name]
    virtual = builder.default_virtual_stages
    sets = [*DEEP, "mesh.pp=2", f"pipeline.schedule={name}"]
    if problems_of("nano", sets):
        # Interleaved schedules take any number from two: it is said by whoever wants one.
        assert list(problems_of("nano", sets)) == ["schedule-stages-per-rank"]
        sets.append(f"pipeline.virtual_stages={virtual}")
    plan = load_job("nano", sets).plan
    assert plan.layout.pipeline.virtual_stages == virtual
    assert plan.num_stages == 2 * virtual
    assert plan.layout.pipeline.rows == ()
    assert list(chain.from_iterable(plan.layout.pipeline.stages)) == list(range(8))
    check_schedule(schedule_from_plan(plan))


def test_what_a_schedule_puts_on_a_rank_is_derived_and_written_out(tmp_path: Path) -> None:
    job = load_job("nano", ["mesh.pp=2", "pipeline.schedule=zb-v"])
    assert job.plan.layout.pipeline.virtual_stages == 2
    assert "zb-v" in job.source_of("pipeline.virtual_stages")
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()
    assert resolved_toml(again) == resolved_toml(job)


BATCH = ("batch.global_sequences=16", "batch.microbatch_sequences=16")

REFUSED = {
    "virtual stages without a schedule for them": (
        [*DEEP, "mesh.pp=2", "pipeline.virtual_stages=2"],
        "schedule-stages-per-rank",
    ),
    "a schedule without virtual stages": (
        [*DEEP, "mesh.pp=2", "pipeline.schedule=breadth-first"],
        "schedule-stages-per-rank",
    ),
    "two of one kind": (
        [*DEEP, "mesh.pp=2", "pipeline.schedule=zb-v", "pipeline.virtual_stages=3"],
        "schedule-stages-per-rank",
    ),
    "too few microbatches": (
        [*DEEP, *BATCH, "mesh.pp=4", "pipeline.schedule=zb-h1"],
        "schedule-needs-microbatches",
    ),
    "an odd number from both ends": (
        [
            *(*DEEP, "mesh.pp=2", "pipeline.schedule=dualpipe"),
            *("batch.microbatch_sequences=2", "batch.global_sequences=14"),
        ],
        "schedule-even-microbatches",
    ),
    "an odd number of ranks": (
        [*DEEP, "mesh.pp=3", "pipeline.schedule=dualpipe"],
        "schedule-even-ranks",
    ),
    "fewer blocks than stages": (
        ["mesh.pp=4", "pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2"],
        "layers-fill-stages",
    ),
    "fewer blocks than any number of stages on each rank": (
        ["mesh.pp=4", "pipeline.schedule=interleaved-1f1b"],
        "schedule-stages-per-rank",
    ),
    "other schedules need more microbatches": (
        [
            *(*DEEP, "mesh.pp=4", "pipeline.virtual_stages=2"),
            *("batch.microbatch_sequences=4", "batch.global_sequences=16"),
        ],
        "schedule-stages-per-rank",
    ),
    "as many blocks as an odd number of ranks": (
        [
            *("model.layers=5", "mesh.pp=6", "pipeline.schedule=dualpipe"),
            *("batch.microbatch_sequences=1", "batch.global_sequences=24"),
        ],
        "layers-fill-stages",
    ),
    "lists for other numbers": (
        ["mesh.pp=2", "pipeline.stages=[[0, 1, 2, 3]]"],
        "stages-match-mesh",
    ),
    "a name that nobody knows": (
        ["mesh.pp=4", "pipeline.schedule=1fb1"],
        "schedule-known",
    ),
    "a block left out": (
        ["mesh.pp=2", "pipeline.stages=[[0, 1], [3]]"],
        "stages-cover-layers",
    ),
    "a block twice": (
        ["mesh.pp=2", "pipeline.stages=[[0, 1], [1, 2, 3]]"],
        "stages-cover-layers",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("sets", "rule"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_is_refused_with_settings_that_can(sets: list[str], rule: str) -> None:
    found = problems_of("nano", sets)
    assert list(found) == [rule]
    settings = [
        advice for advice in found[rule].suggestions if advice.partition(" = ")[0].count(".")
    ]
    assert settings, found[rule].suggestions
    for advice in settings:
        assert problems_of("nano", taken(advice, sets)) == {}, advice


def test_what_a_file_fixes_is_not_suggested_otherwise(tmp_path: Path) -> None:
    path = csv(tmp_path / "five.csv", rows_of("gpipe", 5, 5, 8))
    sets = [*from_file(path)[1:], "mesh.pp=5"]
    found = problems_of("nano", sets)
    assert list(found) == ["layers-fill-stages"]
    (advice,) = found["layers-fill-stages"].suggestions
    assert advice == "pipeline.stages = [[0], [1], [2], [3], []]"
    assert problems_of("nano", taken(advice, sets)) == {}


def test_what_measured_times_fix_is_not_suggested_otherwise(tmp_path: Path) -> None:
    sets = ["mesh.pp=4", "batch.microbatch_sequences=8", "batch.global_sequences=16"]
    path = times_file(load_job("nano", sets[1:]).plan, tmp_path / "times.json")
    sets.append(f"pipeline.times={path}")
    found = problems_of("nano", sets)
    assert list(found) == ["schedule-needs-microbatches"]
    works = found["schedule-needs-microbatches"].suggestions
    assert "batch.global_sequences = 32" in works
    assert not any(advice.startswith("batch.microbatch_sequences") for advice in works)


NO_EFFECT = {
    "a file that is not read": ["mesh.pp=2", "pipeline.file=mine.csv"],
    "a limit of a builder": ["mesh.pp=2", "pipeline.most_in_flight=2"],
    "times of an even split": ["mesh.pp=2", "pipeline.stages=even", "pipeline.times=TIMES"],
    "times of one stage": ["pipeline.times=TIMES"],
    "a search over one rank": ["pipeline.schedule=auto"],
}


@pytest.mark.parametrize("sets", NO_EFFECT.values(), ids=list(NO_EFFECT))
def test_settings_without_effect_are_errors(sets: list[str], tmp_path: Path) -> None:
    path = times_file(load_job("nano").plan, tmp_path / "times.json")
    found = problems_of("nano", [text.replace("TIMES", str(path)) for text in sets])
    assert list(found) == ["no-effect"]


def test_the_rows_of_a_file_are_in_the_plan(tmp_path: Path) -> None:
    rows = rows_of("zb-v", 4, 2, 8)
    path = csv(tmp_path / "mine.csv", rows)
    job = load_job("nano", from_file(path))
    pipeline = job.plan.layout.pipeline
    assert pipeline.rows == tuple(rows)
    assert (pipeline.schedule, pipeline.virtual_stages, job.plan.num_stages) == ("file", 2, 4)
    assert schedule_from_plan(job.plan).stage_ranks == (0, 1, 1, 0)
    assert Plan.from_json(job.plan.to_json()) == job.plan
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()
