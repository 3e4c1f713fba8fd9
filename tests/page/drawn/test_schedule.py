"""Boxes of a schedule lie where their actions start and end."""

from __future__ import annotations

import re
from math import inf, nan

import pytest

from echelon.config.load import load_job
from echelon.page.documents.plan import KIND_WORDS, plan_page
from echelon.page.drawn.document import drawing
from echelon.page.drawn.lines import draw_schedule
from echelon.page.drawn.marks import PAGE, TINTS
from echelon.planner.view.document import ScheduleChart, ScheduleFigure, ScheduleLane
from tests.page.drawn.reading import HOSTILE, assert_words_are_clear, paths, texts


def shapes(path: str) -> list[tuple[float, ...]]:
    found = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z", path)
    assert len(found) == path.count("M")
    return [tuple(map(float, one)) for one in found]


def test_every_action_is_drawn_where_it_starts() -> None:
    page = plan_page(load_job("nano", ("mesh.pp=4", "model.layers=16")).plan)
    section = next(one for one in page.sections if one.id == "schedule")
    figure = section.figure
    assert isinstance(figure, ScheduleFigure)
    found = drawing(section)
    assert found is not None
    by_fill = {path.attrib["fill"]: shapes(path.attrib["d"]) for path in paths(found)}
    (chart,) = figure.charts
    for kind in range(len(KIND_WORDS)):
        starts = [
            (lane.starts[at], lane.ends[at])
            for lane in chart.lanes
            for at, one in enumerate(lane.kinds)
            if one == kind
        ]
        drawn = by_fill.get(TINTS[kind], [])
        assert len(drawn) == len(starts)
        for (left, _, width, _), (start, end) in zip(drawn, starts, strict=True):
            scale = (PAGE - 64) / chart.span_s
            assert left == pytest.approx(64 + start * scale, abs=0.01)
            assert width == pytest.approx((end - start) * scale, abs=0.52)
    assert_words_are_clear(found)
    said = texts(found)
    assert said[:2] == ["forward", "backward"]
    assert [one for one in ("rank 0", "rank 3", "7") if one not in said] == []


@pytest.mark.parametrize("lanes", [1, 20, 64])
def test_times_that_are_none_are_left_out(lanes: int) -> None:
    lane = ScheduleLane(
        label=HOSTILE,
        kinds=(0, 0, 0, 3, 1),
        stages=(0,) * 5,
        microbatches=(0, 1, 2, 3, 4),
        starts=(nan, -5.0, 2.0, 0.0, 4.0),
        ends=(1.0, -1.0, 1.0, inf, 99.0),
        idle_text="",
    )
    chart = ScheduleChart(
        name=HOSTILE, lanes=(lane,) * lanes, span_s=10.0, span_text=HOSTILE, bubble_text=""
    )
    drawing = draw_schedule(ScheduleFigure(kinds=KIND_WORDS, charts=(chart, chart)), HOSTILE, "")
    assert_words_are_clear(drawing)
    found = [shape for path in paths(drawing) for shape in shapes(path.attrib["d"])]
    assert len(found) == 2 * lanes
    assert all(left + width <= PAGE for left, _, width, _ in found)
