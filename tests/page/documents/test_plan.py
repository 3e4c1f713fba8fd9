"""The page of a plan: every number is the calculator's, and parts add up to their totals."""

from __future__ import annotations

from math import fsum

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.core.units import binary_bytes
from echelon.page.documents.plan import plan_page
from echelon.planner.lint.checks import lint
from echelon.planner.predict.estimate import estimate_plan
from echelon.planner.predict.stage_rows import sent_by_axis, stage_rows
from echelon.planner.view.document import BarsFigure, PageDocument, Section, WaterfallFigure
from echelon.planner.view.plan_figures import memory_rows_from_plan

PIPELINE = ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2")


def plan_of(*settings: str) -> Plan:
    return load_job("nano", settings).plan


def part(page: PageDocument, name: str) -> Section:
    return next(one for one in page.sections if one.id == name)


def test_a_plan_has_all_its_parts_and_one_rank_has_no_groups() -> None:
    parts = [one.id for one in plan_page(plan_of(*PIPELINE)).sections]
    assert parts[:4] == ["run", "memory", "memory-terms", "held"]
    figures = ["memory", "step", "schedule", "mesh", "sent", "messages"]
    assert [one for one in parts if one in figures] == figures
    alone = [one.id for one in plan_page(plan_of("mesh.tp=1")).sections]
    assert {"mesh", "sent", "schedule"} & set(alone) == set()


def test_memory_is_that_of_the_formulas() -> None:
    plan = plan_of(*PIPELINE)
    estimate = estimate_plan(plan)
    figure = part(plan_page(plan), "memory").figure
    assert isinstance(figure, BarsFigure)
    fullest, *rows = figure.rows
    assert fullest.total == pytest.approx(estimate.bytes_held, abs=0.5)
    assert fullest.total_text == binary_bytes(fullest.total)
    assert figure.limit == plan.cluster.device.memory_bytes
    for row, (label, terms) in zip(rows, memory_rows_from_plan(plan), strict=True):
        assert row.label == label
        assert fsum(row.values) == pytest.approx(row.total, abs=0.5)
        shown = dict(zip(figure.kinds, row.values, strict=True))
        assert shown["parameters"] == terms["parameters"]
        assert shown["gradients"] == terms["gradients"]
        assert not row.over


def test_seconds_are_those_of_the_estimate_and_bars_stand_end_to_end() -> None:
    plan = plan_of(*PIPELINE)
    estimate = estimate_plan(plan)
    section = part(plan_page(plan), "step")
    figure = section.figure
    assert isinstance(figure, WaterfallFigure)
    assert figure.total == pytest.approx(estimate.step_s, rel=1e-12)
    reached = 0.0
    for row in figure.rows:
        assert row.start == pytest.approx(reached, rel=1e-12)
        reached = row.start + fsum(one.seconds for one in row.parts)
    assert reached == pytest.approx(estimate.step_s, rel=1e-12)
    assert figure.low <= figure.total <= figure.high
    assert section.table is not None
    assert section.table.rows[-1][:2] == ("sum (step)", f"{figure.total:.4g}")


def test_bytes_sent_are_exact() -> None:
    plan = plan_of(*PIPELINE)
    section = part(plan_page(plan), "sent")
    assert section.table is not None
    rows = {int(row[0]): row[1:] for row in section.table.rows}
    for row in stage_rows(plan):
        sent = sent_by_axis(row)
        shown = dict(zip(section.table.head[1:], rows[row.pp_rank], strict=True))
        assert {axis: int(shown[axis].replace(",", "")) for axis in sent} == dict(sent)
        assert int(shown["bytes in all"].replace(",", "")) == sum(sent.values())


def test_what_does_not_fit_is_no_good_news() -> None:
    settings = ("cluster.preset=8xh100", "mesh.dp_replicate=8")
    plan = load_job("llama3-70b", settings).plan
    page = plan_page(plan)
    assert not page.good
    assert page.verdict.startswith("The plan does not fit")
    figure = part(page, "memory").figure
    assert isinstance(figure, BarsFigure)
    assert figure.rows[0].over


def test_notes_are_those_of_the_lints() -> None:
    plan = plan_of("mesh.pp=4", "model.layers=16")
    table = part(plan_page(plan), "notes").table
    assert table is not None
    assert [row[0] for row in table.rows] == [one.id for one in lint(plan)]
