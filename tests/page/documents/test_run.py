"""The page of a run: lines are its metrics; what else is in its folder is a part of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.page.documents.curves import MOST_POINTS
from echelon.page.documents.run import run_page
from echelon.page.html import document_json
from echelon.planner.view.document import LinesFigure, PageDocument, ScheduleFigure, Section
from tests.page.documents.test_proof import proof
from tests.page.documents.test_rehearsal import rehearsal
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run
from tests.telemetry.runs import make_run


def steps(count: int, ranks: int = 2, **more: Any) -> str:
    lines: list[dict[str, Any]] = [{"kind": "start", "step": 0, "steps": count}]
    lines += [
        {
            "kind": "step",
            "step": number,
            "loss": 5.0 / number,
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
            "tokens": 64,
            "step_s": 0.25,
            "rank_waits_s": [0.125] * ranks,
            "rank_used_bytes": [2**20] * ranks,
            "peak_bytes": 2**20,
            **more,
        }
        for number in range(1, count + 1)
    ]
    lines.append({"kind": "validation", "step": count, "loss": 3.5})
    return "".join(json.dumps(line) + "\n" for line in lines)


def written(tmp_path: Path, text: str) -> Path:
    run = make_run(tmp_path)
    (run.path / "metrics.jsonl").write_text(text)
    return run.path


def part(page: PageDocument, name: str) -> Section:
    return next(one for one in page.sections if one.id == name)


def test_lines_are_the_metrics_of_the_run(tmp_path: Path) -> None:
    page = run_page(written(tmp_path, steps(5)))
    assert page.good
    assert page.verdict == "The run finished, 5 of 5 steps: loss 5.0000 to 1.0000."
    loss = part(page, "loss").figure
    assert isinstance(loss, LinesFigure)
    assert loss.steps == (1, 2, 3, 4, 5)
    assert loss.series[0].values == (5.0, 2.5, 5 / 3, 1.25, 1.0)
    assert loss.series[1].values == (None, None, None, None, 3.5)
    assert [one.joined for one in loss.series] == [False, True]
    waits = part(page, "waits").figure
    assert isinstance(waits, LinesFigure)
    assert [one.name for one in waits.series] == ["rank 0", "rank 1"]
    assert part(page, "used").summary == (
        "Memory of each rank goes from 1.00 MiB to 1.00 MiB; the least is 1.00 MiB, the most "
        "1.00 MiB."
    )


@pytest.mark.parametrize(("cores", "told"), [(1.0, True), (1.5, True), (2, False), (8.0, False)])
def test_ranks_that_share_cores_are_told(tmp_path: Path, cores: float, *, told: bool) -> None:
    run = write_run(tmp_path, plan_of(), [{1: stage_times(1.0, 1.5)}]).path
    assert plan_of().mesh.world_size == 2
    (run / "metrics.jsonl").write_text(steps(5))
    (run / "environment.json").write_text(json.dumps({"usable_cores": cores}))
    step = next(one for one in run_page(run).facts if one.name == "step, median")
    assert step.note.startswith("planned ")
    assert ("; 2 ranks share 1" in step.note) == told


def test_the_schedule_is_drawn_as_planned_and_as_measured(tmp_path: Path) -> None:
    times = stage_times(1.0, 1.5)
    run = write_run(tmp_path, plan_of(), [{step: times for step in range(1, 4)}])
    # Its marks alone stand in the metrics of such a run; a real one writes more of each step.
    metrics = run.path / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    numbers = json.loads(steps(1).splitlines()[1])
    told = [{**numbers, **line} if line["kind"] == "step" else line for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in told))
    figure = part(run_page(run.path), "schedule").figure
    assert isinstance(figure, ScheduleFigure)
    assert [chart.name for chart in figure.charts] == [
        "simulated with the measured times",
        "measured, step 3",
    ]
    planned, measured = figure.charts
    assert measured.span_s == pytest.approx(planned.span_s, rel=1e-6)


def test_a_schedule_that_was_not_recorded_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [])
    schedule = part(run_page(run.path), "schedule")
    assert schedule.figure is None
    assert schedule.summary.startswith("Not drawn: ")


def test_a_run_that_did_nothing_has_a_page(tmp_path: Path) -> None:
    page = run_page(make_run(tmp_path).path)
    assert not page.good
    assert "loss" not in [one.id for one in page.sections]


def test_proof_and_rehearsal_of_the_folder_are_parts(tmp_path: Path) -> None:
    path = written(tmp_path, steps(2))
    (path / "proof.json").write_text(json.dumps(proof(holds=True)))
    (path / "rehearsal.json").write_text(json.dumps(rehearsal()))
    names = [one.id for one in run_page(path).sections]
    assert names[names.index("proof") :][:3] == ["proof", "proof-claims", "rehearsed-memory"]


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"proven": true, "passes": 3}', "null"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, steps(2))
    (path / "proof.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        run_page(path)
    (problem,) = caught.value.problems
    assert problem.rule == "events-readable"
    assert "proof.json" in problem.message


@pytest.mark.slow
def test_a_long_run_of_many_ranks_stays_small(tmp_path: Path) -> None:
    page = run_page(written(tmp_path, steps(10_000, ranks=64)))
    loss = part(page, "loss").figure
    assert isinstance(loss, LinesFigure)
    assert MOST_POINTS // 2 < len(loss.steps) <= MOST_POINTS + 1
    assert (loss.steps[0], loss.steps[-1]) == (1, 10_000)
    assert len(document_json(page)) < 1_000_000
    assert "The first 16 of 64 ranks are drawn." in part(page, "waits").summary
