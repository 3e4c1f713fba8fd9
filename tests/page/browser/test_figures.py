"""What is drawn: numbers read from the page are those of the document, and lengths their ratios."""

from __future__ import annotations

import re
from typing import Any

import pytest

from echelon.core.axis import MESH_AXES
from echelon.planner.view.document import (
    BarsFigure,
    LinesFigure,
    PageDocument,
    ScheduleFigure,
    Section,
    WaterfallFigure,
)
from tests.page.browser.conftest import Opener
from tests.page.browser.documents import documents, plan

pytestmark = pytest.mark.timeout(120)
PIXEL = 1.01


def part(document: PageDocument, name: str) -> Section:
    return next(one for one in document.sections if one.id == name)


def box(found: Any) -> tuple[float, float]:
    """Return where an element begins and how wide it is."""
    rectangle = found.bounding_box()
    assert rectangle is not None
    return rectangle["x"], rectangle["width"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["memory", "sent"])
def test_bars_are_as_long_as_their_bytes(name: str, shared: Opener) -> None:
    document = documents()["plan"]
    figure = part(document, name).figure
    assert isinstance(figure, BarsFigure)
    page = shared(document).page
    rows = page.locator(f"#{name} .row")
    assert rows.count() == len(figure.rows)
    most = max(figure.limit, *(row.total for row in figure.rows))
    for place, row in enumerate(figure.rows):
        shown = rows.nth(place)
        assert shown.locator(".label").inner_text() == row.label
        assert shown.locator(".value").inner_text() == row.total_text
        assert shown.locator(".share").inner_text() == row.share_text
        left, width = box(shown.locator(".bar"))
        there = [value for value in row.values if value > 0]
        assert shown.locator(".part").count() == len(there)
        reached = left
        for number, value in enumerate(there):
            at, long = box(shown.locator(".part").nth(number))
            assert long == pytest.approx(value / most * width, abs=PIXEL)
            assert at == pytest.approx(reached, abs=PIXEL)
            reached = at + long
    legend = page.locator(f"#{name} .legend li").all_inner_texts()
    used = [any(row.values[place] > 0 for row in figure.rows) for place in range(len(figure.kinds))]
    assert legend == [kind for kind, there in zip(figure.kinds, used, strict=True) if there]


def test_the_waterfall_is_as_long_as_its_seconds(shared: Opener) -> None:
    document = documents()["plan"]
    figure = part(document, "step").figure
    assert isinstance(figure, WaterfallFigure)
    page = shared(document).page
    rows = page.locator("#step .row")
    assert rows.count() == len(figure.rows) + 1
    for place, row in enumerate(figure.rows):
        shown = rows.nth(place)
        assert shown.locator(".value").inner_text() == row.text
        assert shown.locator(".share").inner_text() == row.share_text
        left, width = box(shown.locator(".bar"))
        at, _ = box(shown.locator(".part").first)
        assert at - left == pytest.approx(row.start / figure.high * width, abs=PIXEL)
        parts = [box(one)[1] for one in shown.locator(".part").all()]
        wanted = [one.seconds / figure.high * width for one in row.parts]
        assert parts == pytest.approx(wanted, abs=PIXEL)
    assert rows.last.locator(".value").inner_text() == figure.total_text


def test_tables_have_every_number(shared: Opener) -> None:
    for document in (documents()["plan"], documents()["run"]):
        page = shared(document).page
        for one in document.sections:
            if one.table is None:
                continue
            read = "(t) => [...t.rows].map((r) => [...r.cells].map((c) => c.textContent))"
            shown = page.locator(f"#{one.id} table").last.evaluate(read)
            assert shown == [list(one.table.head), *map(list, one.table.rows)]


def test_a_rank_shows_its_groups(shared: Opener) -> None:
    mesh = plan().mesh
    page = shared(documents()["plan"]).page
    for rank in range(mesh.world_size):
        page.fill("#mesh input[name=rank]", str(rank))
        shown = page.locator("#mesh .groups li").all_inner_texts()
        axes = [axis for axis in MESH_AXES if mesh.degree(axis) > 1]
        for axis, text in zip(axes, shown, strict=True):
            (group,) = [one for one in mesh.groups(axis) if rank in one]
            place = mesh.coordinates(rank)[axis]
            assert text.startswith(f"{axis.value} {place} of {mesh.degree(axis)} ")
            told = text.rpartition("ranks ")[2]
            spread = re.sub(r"(\d+)-(\d+)", lambda m: _spread(int(m[1]), int(m[2])), told)
            assert tuple(map(int, spread.split(", "))) == group


def _spread(first: int, last: int) -> str:
    return ", ".join(str(rank) for rank in range(first, last + 1))


def test_a_click_chooses_the_rank_that_is_drawn_there(shared: Opener) -> None:
    page = shared(documents()["plan"]).page
    canvas = page.locator("#mesh canvas")
    seen = set()
    rectangle = canvas.bounding_box()
    assert rectangle is not None
    for x in range(10, min(int(rectangle["width"]), 520), 56):
        for y in range(26, int(rectangle["height"]), 56):
            canvas.click(position={"x": x, "y": y})
            seen.add(int(page.input_value("#mesh input[name=rank]")))
    assert seen == set(range(plan().mesh.world_size))


def test_the_keyboard_walks_every_action_of_a_schedule(shared: Opener) -> None:
    document = documents()["run"]
    figure = part(document, "schedule").figure
    assert isinstance(figure, ScheduleFigure)
    page = shared(document).page
    for place, chart in enumerate(figure.charts):
        canvas = page.locator("#schedule canvas").nth(place)
        canvas.focus()
        page.keyboard.press("Home")
        for lane in (chart.lanes[0],):
            for number in range(len(lane.kinds)):
                said = page.inner_text("#schedule .said")
                assert said.startswith(
                    f"{chart.name}, {lane.label}: {figure.kinds[lane.kinds[number]]} of microbatch "
                    f"{lane.microbatches[number]} on stage {lane.stages[number]}, from "
                )
                assert lane.idle_text in said
                page.keyboard.press("ArrowRight")


def test_zoom_shows_less_time_and_all_shows_the_whole_step(shared: Opener) -> None:
    page = shared(documents()["run"]).page
    pixels = "(c) => c.toDataURL()"
    canvas = page.locator("#schedule canvas").first
    whole = canvas.evaluate(pixels)
    page.get_by_role("button", name="Zoom in").click()
    assert canvas.evaluate(pixels) != whole
    page.get_by_role("button", name="Show the whole step").click()
    assert canvas.evaluate(pixels) == whole


def test_a_line_has_a_point_for_each_step(shared: Opener) -> None:
    document = documents()["run"]
    figure = part(document, "loss").figure
    assert isinstance(figure, LinesFigure)
    page = shared(document).page
    paths = page.locator("#loss path.series")
    assert paths.count() == len(figure.series)
    for place, series in enumerate(figure.series):
        drawn = re.findall(r"[ML]([\d.]+) ([\d.]+)", paths.nth(place).get_attribute("d") or "")
        values = [value for value in series.values if value is not None]
        assert len(drawn) == len(values)
        # The axis is linear: the largest and the least value fix where all others are.
        heights = [float(y) for _, y in drawn]
        most, least = max(values), min(values)
        top, bottom = heights[values.index(most)], heights[values.index(least)]
        for value, height in zip(values, heights, strict=True):
            share = (value - least) / (most - least) if most > least else 0.0
            assert height == pytest.approx(bottom + share * (top - bottom), abs=0.11)
