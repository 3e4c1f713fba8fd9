"""Lines go through the values of their steps, break where there is none, and have round axes."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.page.drawn.lines import draw_lines
from echelon.planner.view.document import LineSeries, LinesFigure
from tests.page.drawn.reading import HOSTILE, assert_words_are_clear, paths, texts
from tests.walks import examples


def lines(*values: float | None, unit: str = "loss", planned: float | None = None) -> LinesFigure:
    return LinesFigure(
        unit=unit,
        steps=tuple(range(1, len(values) + 1)),
        series=(LineSeries(name="loss", values=values),),
        planned=planned,
        planned_text="" if planned is None else f"{planned:g}",
    )


def points(text: str) -> list[tuple[str, float, float]]:
    found = re.findall(r"([ML])([\d.-]+) ([\d.-]+)", text)
    return [(pen, float(x), float(y)) for pen, x, y in found]


def test_a_line_goes_through_its_values() -> None:
    drawing = draw_lines(lines(5.0, 3.0, 1.0, planned=3.0), "Loss", "it falls")
    found = points(paths(drawing)[0].attrib["d"])
    assert [pen for pen, _, _ in found] == ["M", "L", "L"]
    (_, x1, y1), (_, x2, y2), (_, x3, y3) = found
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.11)
    assert y3 > y2 > y1
    said = texts(drawing)
    assert {"loss", "planned: 3", "1", "5"} <= set(said)
    assert_words_are_clear(drawing)


def test_a_step_without_a_value_breaks_the_line_and_one_alone_is_a_dot() -> None:
    path = paths(draw_lines(lines(1.0, None, 2.0, nan, 3.0, 4.0), "Loss", ""))[0].attrib["d"]
    assert [pen for pen, _, _ in points(path)] == ["M", "M", "M", "L"]
    assert path.count("h0.01") == 2


def test_a_joined_line_goes_on_over_steps_without_a_value() -> None:
    found = lines(None, 1.0, None, 2.0, nan, 3.0, None)
    joined = replace(found, series=(replace(found.series[0], joined=True),))
    path = paths(draw_lines(joined, "Loss", ""))[0].attrib["d"]
    assert [pen for pen, _, _ in points(path)] == ["M", "L", "L"]


def test_bytes_have_round_numbers_of_one_unit() -> None:
    said = texts(draw_lines(lines(0.0, 3.5 * 2**30, unit="bytes"), "Memory", ""))
    assert "GiB" in said
    assert {"0", "1", "2", "3", "4"} <= set(said)


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats()), max_size=20), st.sampled_from(["s", "bytes"]))
def test_any_values_are_drawn(values: list[float | None], unit: str) -> None:
    drawing = draw_lines(lines(*values, unit=unit, planned=inf), HOSTILE, HOSTILE)
    assert_words_are_clear(drawing)
    for path in paths(drawing):
        assert all(-1 <= y <= drawing.height for _, _, y in points(path.attrib["d"]))
