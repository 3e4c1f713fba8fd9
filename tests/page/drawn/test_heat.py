"""Cells are as dark as their values, and say their numbers where there is room."""

from __future__ import annotations

from math import nan

from echelon.page.drawn.bars import draw_heat
from echelon.planner.view.document import HeatFigure, HeatRow
from tests.page.drawn.reading import HOSTILE, NAMESPACE, assert_words_are_clear, root_of, texts


def heat(values: tuple[float | None, ...], texts: tuple[str, ...], label: str = "q") -> HeatFigure:
    return HeatFigure(
        columns=tuple(f"rank {place}" for place in range(len(values))),
        rows=(HeatRow(label=label, values=values, texts=texts),),
        most=4.0,
        legend="Wrong ranks",
    )


def test_a_cell_is_as_dark_as_its_value() -> None:
    drawing = draw_heat(heat((0.0, 1.0, 4.0, None, nan), ("0", "1", "4", "-", "?")), "Heat", "")
    found = [one for one in root_of(drawing).iter(f"{NAMESPACE}rect") if len(one)]
    shares = [float(one.get("fill-opacity", 1)) for one in found]
    assert shares == [0.0, 0.25, 1.0]
    said = texts(drawing)
    assert said[-1] == "Wrong ranks"
    assert [one for one in said if one in ("0", "1", "4", "-", "?")] == ["0", "1", "4", "-", "?"]


def test_many_columns_and_hostile_names_stay_on_the_paper() -> None:
    wide = heat((1.0,) * 300, ("wrong",) * 300, HOSTILE)
    assert_words_are_clear(draw_heat(wide, HOSTILE, ""))
    assert_words_are_clear(draw_heat(heat((), ()), "none", ""))
