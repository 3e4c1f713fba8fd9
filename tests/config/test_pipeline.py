"""Settings of the pipeline: schedules by name, from a file, by search; stages balanced by times."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.config.placement import found_of, stage_placements
from echelon.config.show import resolved_toml
from echelon.core.plan import Plan
from echelon.cost.balance import split_layers
from echelon.cost.unit_times import modelled_times, stage_durations
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.check import check_schedule
from echelon.schedule.of_plan import schedule_of
from echelon.schedule.simulate import simulate
from tests.config.measured import times_file
from tests.config.problems import problems_of, write
from tests.config.suggestions import taken

DEEP = ["model.layers=8", 'model.name="deep"']


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
    check_schedule(schedule_of(plan))


def test_what_a_schedule_puts_on_a_rank_is_derived_and_written_out(tmp_path: Path) -> None:
    job = load_job("nano", ["mesh.pp=2", "pipeline.schedule=zb-v"])
    assert job.plan.layout.pipeline.virtual_stages == 2
    assert "zb-v" in job.source_of("pipeline.virtual_stages")
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()
    assert resolved_toml(again) == resolved_toml(job)


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
        [*DEEP, "mesh.pp=4", "pipeline.schedule=zb-h1", "batch.microbatch_sequences=16"],
        "schedule-needs-microbatches",
    ),
    "an odd number from both ends": (
        [*DEEP, "mesh.pp=2", "pipeline.schedule=dualpipe", "batch.global_sequences=14"],
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


@pytest.mark.parametrize(("sets", "rule"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_is_refused_with_settings_that_can(sets: list[str], rule: str) -> None:
    found = problems_of("nano", sets)
    assert list(found) == [rule]
    settings = [advice for advice in found[rule].works if advice.partition(" = ")[0].count(".")]
    assert settings, found[rule].works
    for advice in settings:
        assert problems_of("nano", taken(advice, sets)) == {}, advice


def test_what_a_file_fixes_is_not_suggested_otherwise(tmp_path: Path) -> None:
    path = csv(tmp_path / "five.csv", rows_of("gpipe", 5, 5, 8))
    sets = [*from_file(path)[1:], "mesh.pp=5"]
    found = problems_of("nano", sets)
    assert list(found) == ["layers-fill-stages"]
    (advice,) = found["layers-fill-stages"].works
    assert advice == "pipeline.stages = [[0], [1], [2], [3], []]"
    assert problems_of("nano", taken(advice, sets)) == {}


def test_what_measured_times_fix_is_not_suggested_otherwise(tmp_path: Path) -> None:
    sets = ["mesh.pp=4", "batch.microbatch_sequences=8"]
    path = times_file(load_job("nano", sets[1:]).plan, tmp_path / "times.json")
    sets.append(f"pipeline.times={path}")
    found = problems_of("nano", sets)
    assert list(found) == ["schedule-needs-microbatches"]
    works = found["schedule-needs-microbatches"].works
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


def test_even_stages_are_even_in_blocks() -> None:
    heavy = [*DEEP, "mesh.pp=2", "model.vocab=16384"]
    even = load_job("nano", [*heavy, "pipeline.stages=even"])
    assert even.plan.layout.pipeline.stages == split_layers(8, 2)
    assert "an even split" in even.source_of("pipeline.stages")
    auto = load_job("nano", heavy)
    first, last = map(len, auto.plan.layout.pipeline.stages)
    assert first > last
    source = auto.source_of("pipeline.stages")
    assert source.startswith("derived: balanced by modelled times, slowest rank 1.")
    assert "(even split 1." in source
    slow, fast = (
        max(d.forward_s[s] + d.backward_s[s] for s in range(2))
        for d in (stage_durations(p, modelled_times(p)) for p in (even.plan, auto.plan))
    )
    assert fast < slow


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "breadth-first", "zb-v"])
@pytest.mark.parametrize("vocab", [300, 4000, 16000])
def test_balanced_stages_make_no_simulated_step_longer(name: str, vocab: int) -> None:
    virtual = SCHEDULES[name].default_virtual_stages
    sets = ["model.layers=12", "mesh.pp=2", f"pipeline.schedule={name}", f"model.vocab={vocab}"]
    sets.append(f"pipeline.virtual_stages={virtual}")
    seconds: list[float] = []
    for word in ("auto", "even"):
        plan = load_job("nano", [*sets, f"pipeline.stages={word}"]).plan
        durations = stage_durations(plan, modelled_times(plan))
        seconds.append(simulate(schedule_of(plan), durations).makespan_s)
    auto, even = seconds
    assert auto <= even * (1 + 1e-9)
    if vocab == 16000:
        assert auto < 0.95 * even


def csv(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(row.replace(" ", ",") + "\n" for row in rows))
    return path


def rows_of(name: str, stages: int, ranks: int, microbatches: int) -> list[str]:
    schedule = build_schedule(
        name, num_stages=stages, num_ranks=ranks, num_microbatches=microbatches
    )
    return [" ".join(map(str, row)) for row in schedule.actions]


FROM_FILE = ["mesh.pp=2", "pipeline.schedule=file", "pipeline.file=FILE"]


def from_file(path: Path, *more: str) -> list[str]:
    return [*(text.replace("FILE", str(path)) for text in FROM_FILE), *more]


def test_the_rows_of_a_file_are_in_the_plan(tmp_path: Path) -> None:
    rows = rows_of("zb-v", 4, 2, 8)
    path = csv(tmp_path / "mine.csv", rows)
    job = load_job("nano", from_file(path))
    pipeline = job.plan.layout.pipeline
    assert pipeline.rows == tuple(rows)
    assert (pipeline.schedule, pipeline.virtual_stages, job.plan.num_stages) == ("file", 2, 4)
    assert schedule_of(job.plan).stage_ranks == (0, 1, 1, 0)
    assert Plan.from_json(job.plan.to_json()) == job.plan
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()


def test_a_file_may_send_microbatches_both_ways(tmp_path: Path) -> None:
    path = csv(tmp_path / "both.csv", rows_of("dualpipe", 2, 2, 8))
    plan = load_job("nano", from_file(path)).plan
    named = load_job("nano", ["mesh.pp=2", "pipeline.schedule=dualpipe"]).plan
    schedule = schedule_of(plan)
    assert schedule.actions == schedule_of(named).actions
    assert schedule.mirrored == schedule_of(named).mirrored
    assert plan.layout.pipeline.virtual_stages == 1
    assert plan.layout.pipeline.stages == named.layout.pipeline.stages


def test_a_file_may_put_a_tied_embedding_on_two_ranks_only(tmp_path: Path) -> None:
    # Microbatch 1 crosses the ranks the other way round.
    placement = (0, 2, 3, 1)
    words: list[list[str]] = [[] for _ in placement]
    for microbatch in (0, 1):
        for kind, stages in (("F", range(4)), ("BW", range(3, -1, -1))):
            for stage in stages:
                rank = placement[stage] if microbatch == 0 else 3 - placement[stage]
                words[rank].append(f"{kind}{stage}.{microbatch}")
    path = csv(tmp_path / "both.csv", [" ".join(row) for row in words])
    run = ["mesh.pp=4", "batch.microbatch_sequences=8"]
    sets = [*from_file(path)[1:], *run]
    found = problems_of("nano", [*sets, "model.tied=true"])
    assert list(found) == ["tied-ends-mirrored"]
    problem = found["tied-ends-mirrored"]
    assert problem.key == "pipeline.file"
    assert problem.set_by.startswith(f"--set pipeline.file={path}")
    assert "ranks 0 and 3" in problem.message
    assert problems_of("nano", taken(problem.works[0], sets)) == {}


@pytest.mark.parametrize(
    ("more", "works"),
    [
        (["mesh.pp=4"], ["mesh.pp = 2"]),
        (
            ["batch.global_sequences=32"],
            ["batch.global_sequences = 16", "batch.microbatch_sequences = 4"],
        ),
        (["pipeline.virtual_stages=2"], ["pipeline.virtual_stages = 1"]),
    ],
)
def test_a_file_must_have_the_numbers_of_the_run(
    tmp_path: Path, more: list[str], works: list[str]
) -> None:
    path = csv(tmp_path / "mine.csv", rows_of("1f1b", 2, 2, 8))
    sets = [text for text in from_file(path) if text.partition("=")[0] != more[0].partition("=")[0]]
    found = problems_of("nano", [*sets, *more])
    assert list(found) == ["schedule-file-fits-run"]
    problem = found["schedule-file-fits-run"]
    assert list(problem.works) == works
    assert problem.key == "pipeline.file"
    for advice in works:
        assert problems_of("nano", taken(advice, [*sets, *more])) == {}


def test_a_file_that_is_wrong_is_refused_by_its_cell(tmp_path: Path) -> None:
    rows = rows_of("1f1b", 2, 2, 8)
    broken = csv(tmp_path / "broken.csv", [rows[0].replace("BW0.3 ", ""), rows[1]])
    found = problems_of("nano", from_file(broken))
    assert list(found) == ["schedule-covers-once"]
    assert "microbatch 3" in found["schedule-covers-once"].message
    whole = csv(tmp_path / "whole.csv", rows)
    over = problems_of("nano", from_file(whole, "pipeline.most_in_flight=1"))
    assert list(over) == ["schedule-within-memory"]
    assert problems_of("nano", from_file(whole, "pipeline.most_in_flight=2")) == {}
    assert list(problems_of("nano", from_file(tmp_path / "none.csv"))) == ["no-such-file"]
    assert list(problems_of("nano", from_file(Path("x"))[:2])) == ["missing-setting"]
    uneven = csv(tmp_path / "uneven.csv", ["F0.0 F2.0 BW2.0 BW0.0", "F1.0 BW1.0"])
    one = problems_of("nano", from_file(uneven, "batch.microbatch_sequences=16"))
    assert list(one) == ["schedule-file-fits-run"]
    assert "3 stages" in one["schedule-file-fits-run"].message


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_search_fills_the_rows_and_says_how_good_they_are(tmp_path: Path, virtual: int) -> None:
    sets = [*DEEP, "mesh.pp=2", "pipeline.schedule=auto", f"pipeline.virtual_stages={virtual}"]
    job = load_job("nano", sets)
    plan = job.plan
    schedule = schedule_of(plan)
    report = check_schedule(schedule)
    assert plan.layout.pipeline.schedule == "auto"
    assert max(report.peak_in_flight_per_rank) <= 2 * virtual
    assert job.source_of("pipeline.most_in_flight").startswith("derived: ")
    assert schedule.stage_ranks in stage_placements(2, virtual)
    times = modelled_times(plan)
    makespan = simulate(schedule, stage_durations(plan, times)).makespan_s
    assert found_of(job).startswith(f"{1e3 * makespan:.4g} ms a step")
    one = load_job("nano", [*DEEP, "mesh.pp=2"]).plan
    assert makespan <= simulate(schedule_of(one), stage_durations(one, times)).makespan_s
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()
    limit = [*sets, f"pipeline.most_in_flight={virtual}"]
    peaks = check_schedule(schedule_of(load_job("nano", limit).plan)).peak_in_flight_per_rank
    assert max(peaks) == virtual


def test_a_search_that_is_free_to_puts_two_stages_on_a_rank_where_that_is_faster(
    tmp_path: Path,
) -> None:
    def step_s(*settings: str) -> tuple[float, Job]:
        job = load_job("nano", [*DEEP, "mesh.pp=2", "pipeline.schedule=auto", *settings])
        durations = stage_durations(job.plan, modelled_times(job.plan))
        return simulate(schedule_of(job.plan), durations).makespan_s, job

    one, two = (step_s(f"pipeline.virtual_stages={n}")[0] for n in (1, 2))
    assert two < one
    found, job = step_s()
    pipeline = job.plan.layout.pipeline
    assert found == two
    assert pipeline.virtual_stages == 2
    assert job.source_of("pipeline.virtual_stages").startswith("derived: the search is fastest")
    assert job.source_of("pipeline.most_in_flight").startswith(
        "derived: pp x virtual_stages = 2 x 2"
    )
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()
    # What is listed or limited is in numbers of stages as they are set.
    for settings in ("pipeline.stages=[[0,1,2,3],[4,5,6,7]]", "pipeline.most_in_flight=2"):
        assert step_s(settings)[1].plan.layout.pipeline.virtual_stages == 1


def test_a_search_without_memory_is_refused() -> None:
    sets = [*DEEP, "mesh.pp=2", "pipeline.schedule=auto", "pipeline.virtual_stages=2"]
    found = problems_of("nano", [*sets, "pipeline.most_in_flight=1"])
    (problem,) = found.values()
    assert problem.key == "pipeline.most_in_flight"
    assert "pipeline.most_in_flight=1" in problem.set_by
