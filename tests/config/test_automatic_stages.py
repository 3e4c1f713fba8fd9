"""Which blocks stages hold, and the rows that a search or a file gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.automatic import search_note_of_job, stage_placements
from echelon.config.files.show import resolved_toml
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.cost.seconds.stages import split_layers
from echelon.cost.seconds.unit_times import stage_durations, unit_times_from_formulas
from echelon.schedule.build import SCHEDULES
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import simulate
from tests.config.problems import write
from tests.config.schedule_files import DEEP, csv, from_file, rows_of


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
        for d in (stage_durations(p, unit_times_from_formulas(p)) for p in (even.plan, auto.plan))
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
        durations = stage_durations(plan, unit_times_from_formulas(plan))
        seconds.append(simulate(schedule_from_plan(plan), durations).makespan_s)
    auto, even = seconds
    assert auto <= even * (1 + 1e-9)
    if vocab == 16000:
        assert auto < 0.96 * even


def test_a_file_may_send_microbatches_both_ways(tmp_path: Path) -> None:
    path = csv(tmp_path / "both.csv", rows_of("dualpipe", 2, 2, 8))
    plan = load_job("nano", from_file(path)).plan
    named = load_job("nano", ["mesh.pp=2", "pipeline.schedule=dualpipe"]).plan
    schedule = schedule_from_plan(plan)
    assert schedule.actions == schedule_from_plan(named).actions
    assert schedule.mirrored == schedule_from_plan(named).mirrored
    assert plan.layout.pipeline.virtual_stages == 1
    assert plan.layout.pipeline.stages == named.layout.pipeline.stages


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_search_fills_the_rows_and_says_how_good_they_are(tmp_path: Path, virtual: int) -> None:
    sets = [*DEEP, "mesh.pp=2", "pipeline.schedule=auto", f"pipeline.virtual_stages={virtual}"]
    job = load_job("nano", sets)
    plan = job.plan
    schedule = schedule_from_plan(plan)
    report = check_schedule(schedule)
    assert plan.layout.pipeline.schedule == "auto"
    assert max(report.peak_in_flight_per_rank) <= 2 * virtual
    assert job.source_of("pipeline.most_in_flight").startswith("derived: ")
    assert schedule.stage_ranks in stage_placements(2, virtual)
    times = unit_times_from_formulas(plan)
    makespan = simulate(schedule, stage_durations(plan, times)).makespan_s
    assert search_note_of_job(job).startswith(f"{1e3 * makespan:.4g} ms a step")
    one = load_job("nano", [*DEEP, "mesh.pp=2"]).plan
    assert makespan <= simulate(schedule_from_plan(one), stage_durations(one, times)).makespan_s
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()
    limit = [*sets, f"pipeline.most_in_flight={virtual}"]
    peaks = check_schedule(schedule_from_plan(load_job("nano", limit).plan)).peak_in_flight_per_rank
    assert max(peaks) == virtual


@pytest.mark.slow
def test_a_search_that_is_free_to_puts_two_stages_on_a_rank_where_that_is_faster(
    tmp_path: Path,
) -> None:
    def step_s(*settings: str) -> tuple[float, Job]:
        job = load_job("nano", [*DEEP, "mesh.pp=2", "pipeline.schedule=auto", *settings])
        durations = stage_durations(job.plan, unit_times_from_formulas(job.plan))
        return simulate(schedule_from_plan(job.plan), durations).makespan_s, job

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
