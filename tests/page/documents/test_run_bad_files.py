"""Folders of runs that are huge, cut off, damaged or hostile: a page that is right, or a refusal.

Nothing of them is ever run, and a page of them stays small.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.page.documents.plan import chart_from_timelines, schedule_section
from echelon.page.documents.run import run_page
from echelon.page.drawn.document import drawing, static_html
from echelon.page.drawn.marks import svg_file
from echelon.page.html import document_json, page_html
from echelon.planner.view.document import LinesFigure, PageDocument, ScheduleFigure
from echelon.telemetry.events import EventWriter, events_path
from echelon.telemetry.timeline import pipelines_from_plan, planned_timelines
from tests.page.browser.documents import HOSTILE
from tests.page.documents.test_proof import proof
from tests.page.documents.test_rehearsal import rehearsal
from tests.page.documents.test_run import part, steps, written
from tests.page.drawn.test_document_static import HARMLESS, Reader
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run

MOST_BYTES = 10_000_000


def assert_sound(page: PageDocument) -> None:
    """Check that a page is small, has only numbers of JSON, and runs nothing wherever it goes."""
    text = page_html(page)
    assert len(text.encode()) < MOST_BYTES
    data = document_json(page)
    assert not set("<>&") & set(data)
    json.loads(data, parse_constant=pytest.fail)
    assert Reader(static_html(page)).tags <= HARMLESS
    for section in page.sections:
        if (found := drawing(section)) is not None:
            assert "<script" not in svg_file(found)


def mended(path: Path, place: int, **values: Any) -> None:
    """Write other values into a line of a run's metrics; `None` of a text takes it out."""
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    line = json.loads(lines[place]) | values
    lines[place] = json.dumps({name: one for name, one in line.items() if one != "out"})
    file.write_text("\n".join(lines) + "\n")


LONG = 10**400
SHOWN: list[dict[str, Any]] = [
    {"step_s": 5e-324, "tokens": 2**62},
    {"step_s": -3.0},
    {"step": -5},
    {"grad_norm": None, "loss": None, "step_s": None},
    {"rank_waits_s": [LONG, None, HOSTILE, {}, -1.0]},
    {"rank_waits_s": HOSTILE, "rank_used_bytes": {"a": 1}},
    {"rank_used_bytes": [2**70, -5], "peak_bytes": -(2**62)},
    {"kind": HOSTILE},
    {"imbalance": -1.0, "assignments": 0, "dropped": 0},
]
REFUSED: list[dict[str, Any]] = [
    {"loss": LONG},
    {"loss": "1.0"},
    {"loss": True},
    {"loss": [1.0]},
    {"loss": "out"},
    {"tokens": LONG},
    {"step": LONG},
    {"kind": 5},
    {"kind": [HOSTILE * 1000]},
]


@pytest.mark.parametrize("values", SHOWN, ids=str)
def test_a_line_of_odd_values_is_drawn(tmp_path: Path, values: dict[str, Any]) -> None:
    path = written(tmp_path, steps(4))
    mended(path, 2, **values)
    page = run_page(path)
    assert_sound(page)
    for section in page.sections:
        if isinstance(section.figure, LinesFigure):
            for series in section.figure.series:
                assert all(one is None or isfinite(one) for one in series.values)


@pytest.mark.parametrize("values", REFUSED, ids=lambda values: str(values)[:20])
def test_a_line_of_other_kinds_of_values_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    path = written(tmp_path, steps(4))
    mended(path, 2, **values)
    with pytest.raises(ConfigError) as caught:
        run_page(path)
    assert caught.value.rules == ("events-readable",)
    assert "metrics.jsonl line 3" in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("line", [b'{"kind": "step", "loss": NaN}', b"\xff\xfe\x00", b"[" * 9000])
def test_what_is_no_line_of_json_is_refused(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path, steps(2))
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ConfigError) as caught:
        run_page(path)
    assert caught.value.rules == ("events-readable",)
    assert "line 5" in str(caught.value)


def test_numbers_that_overflow_are_gaps(tmp_path: Path) -> None:
    text = steps(3).replace('"loss": 2.5', '"loss": 1e999')
    page = run_page(written(tmp_path, text))
    figure = part(page, "loss").figure
    assert isinstance(figure, LinesFigure)
    assert figure.series[0].values == (5.0, None, 5 / 3)
    assert "inf" not in part(page, "loss").summary


@pytest.mark.parametrize("kept", [0.0, 0.99])
def test_a_run_that_was_cut_off_is_shown_as_far_as_it_goes(tmp_path: Path, kept: float) -> None:
    text = steps(100)
    page = run_page(written(tmp_path, text[: int(kept * len(text))]))
    assert_sound(page)
    assert not page.good or kept == 0.99


def changed(name: str, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / name
        file.write_text(json.dumps(value))

    return change


def plan_is_named(path: Path) -> None:
    plan = json.loads((path / "plan.json").read_text())
    plan["name"] = HOSTILE
    plan["cluster"]["name"] = HOSTILE
    plan["cluster"]["device"]["name"] = HOSTILE
    (path / "plan.json").write_text(json.dumps(plan))


def events_are_hostile(path: Path) -> None:
    events_path(path, 0).write_bytes(gzip.compress(f"{HOSTILE}\n".encode()))


HOSTILE_PROOF = {
    **proof(holds=False, error="nan"),
    "plan": HOSTILE,
    "mesh": HOSTILE,
}
HOSTILE_PROOF["passes"][0]["claims"][0]["statement"] = HOSTILE
WORDS: dict[str, Callable[[Path], None]] = {
    "environment": changed(
        "environment.json",
        {
            "command": ["echelon", HOSTILE * 100],
            "packages": {HOSTILE: HOSTILE},
            "python": [HOSTILE],
            "platform": {HOSTILE: 1},
        },
    ),
    "proof": changed("proof.json", HOSTILE_PROOF),
    "plan": plan_is_named,
    "events": events_are_hostile,
}
OF_OTHERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "environment": ("events-readable", changed("environment.json", [HOSTILE])),
    "proof": ("events-readable", changed("proof.json", {"proven": HOSTILE, "passes": [HOSTILE]})),
    "rehearsal": (
        "events-readable",
        changed("rehearsal.json", rehearsal() | {"plan": HOSTILE, "faults": HOSTILE}),
    ),
    "plan": ("run-exists", changed("plan.json", [HOSTILE])),
    "plan of tomorrow": ("run-exists", changed("plan.json", {"schema": 10**9, "name": HOSTILE})),
}


@pytest.mark.parametrize("name", WORDS)
def test_hostile_files_are_words(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, steps(2))
    WORDS[name](path)
    page = run_page(path)
    assert_sound(page)
    # What is about the run stands whole beside it.
    assert part(page, "loss").summary.startswith("The loss goes from 5 to 2.5")
    hostile = HOSTILE in str(json.loads(document_json(page)))
    assert hostile == (name != "events"), "events that nothing asks for are not read"


@pytest.mark.parametrize("name", OF_OTHERS)
def test_files_of_others_are_refused(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, steps(2))
    rule, change = OF_OTHERS[name]
    change(path)
    with pytest.raises(ConfigError) as caught:
        run_page(path)
    assert caught.value.rules == (rule,)


def test_a_rehearsal_of_very_many_actions_stays_small(tmp_path: Path) -> None:
    found = rehearsal()
    point = found["ranks"][0]["curve"][0]
    for rank in found["ranks"]:
        rank["curve"] = [point] * 20_000
    fault = {"rule": "rehearse-order", "ranks": list(range(16384)), "text": "late"}
    found |= {"faults": [fault] * 3, "holds": False}
    path = written(tmp_path, steps(2))
    (path / "rehearsal.json").write_text(json.dumps(found))
    page = run_page(path)
    assert_sound(page)
    assert "over 20,000 actions. 800 of them are drawn." in part(page, "memory-curve").summary
    table = part(page, "faults").table
    assert table is not None
    assert table.rows[0][1].endswith("63 and 16,320 more")


def test_a_schedule_of_very_many_actions_is_drawn_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echelon.page.documents.plan.MOST_ACTIONS", 400)
    plan = plan_of("batch.global_sequences=64")
    (timeline,) = planned_timelines(pipelines_from_plan(plan), stage_times(1.0, 1.5))[:1]
    every = len(timeline.actions)
    copies = 2 * 400 // every + 1
    span = timeline.span_s
    many = tuple(
        replace(one, start=one.start + span * at, end=one.end + span * at)
        for at in range(copies)
        for one in timeline.events
    )
    chart = chart_from_timelines("planned", [replace(timeline, events=many)])
    assert sum(len(lane.kinds) for lane in chart.lanes) == 400
    assert f"{every * copies // 2:,} actions of each rank are drawn" in chart.bubble_text
    assert chart.span_s == max(end for lane in chart.lanes for end in lane.ends)
    page = replace(run_like(), sections=(schedule_section(plan, [chart]),))
    assert_sound(page)


def run_like() -> PageDocument:
    """Return a page without parts."""
    return PageDocument(title="a", subject="a", verdict="a", good=True, made_by="a")


def huge_run(folder: Path, *, count: int, ranks: int) -> Path:
    """Make a run of many steps of many ranks: its metrics, and the events of each rank."""
    plan = plan_of(
        *(f"mesh.dp_replicate={ranks // 2}", f"batch.global_sequences={2 * ranks}"),
        f"cluster.preset={ranks}xcpu",
    )
    times = stage_times(1.0, 1.5)
    run = write_run(folder, plan, [{step: times for step in range(count - 3, count + 1)}])
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    marks = {line["step"]: line for line in lines if line["kind"] == "step"}
    told = [json.loads(line) for line in steps(count, ranks=ranks).splitlines()]
    told = [line | (marks.get(line["step"], {}) if line["kind"] == "step" else {}) for line in told]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    for rank in range(ranks):
        path = events_path(run.path, rank)
        recorded = path.read_bytes()
        path.unlink()
        writer = EventWriter(run.path, rank)
        writer.close()
        start = path.read_bytes()
        # Steps of which only the loads and the marks were kept stand before the last ones.
        name = '{"kind":"%s","name":"%s %d","start":%d.0,"end":%d.0,"rank":%d}\n'
        some = "".join(
            name % (kind, kind, step, step, step, rank)
            for step in range(1, count - 3)
            for kind in ("load", "step")
        )
        path.write_bytes(start + gzip.compress(some.encode()) + recorded)
    return run.path


def test_a_long_run_of_many_ranks_has_a_small_page(tmp_path: Path) -> None:
    _assert_small(huge_run(tmp_path, count=1000, ranks=4), count=1000, ranks=4)


@pytest.mark.slow
def test_ten_thousand_steps_of_64_ranks_have_a_small_page(tmp_path: Path) -> None:
    path = huge_run(tmp_path, count=10_000, ranks=64)
    _assert_small(path, count=10_000, ranks=64)
    shutil.rmtree(path)


def _assert_small(path: Path, *, count: int, ranks: int) -> None:
    page = run_page(path)
    assert_sound(page)
    assert page.good
    assert f"{count:,} of {count:,} steps" in page.verdict
    schedule = part(page, "schedule").figure
    assert isinstance(schedule, ScheduleFigure)
    simulated = "simulated with the measured times"
    assert [chart.name for chart in schedule.charts] == [simulated, f"measured, step {count}"]
    loss = part(page, "loss").figure
    assert isinstance(loss, LinesFigure)
    assert (loss.steps[0], loss.steps[-1]) == (1, count)
    if ranks > 16:
        assert f"The first 16 of {ranks} ranks are drawn." in part(page, "waits").summary
