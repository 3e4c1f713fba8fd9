"""Bars are as long as their numbers, stand one behind the other, and words stay apart."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.page.drawn.bars import draw_bars
from echelon.page.drawn.marks import PAGE, TINTS, Drawing
from echelon.planner.view.document import BarRow, BarsFigure
from echelon.planner.view.plan_figures import memory_bars
from tests.page.drawn.reading import HOSTILE, assert_words_are_clear, boxes, root_of, texts
from tests.walks import examples

GIB = 2.0**30
TERMS = {"parameters": 10 * GIB, "gradients": 20 * GIB, "activations": 30 * GIB, "slack": 0.0}


def drawn(rows: list[tuple[str, dict[str, float]]], limit: float) -> Drawing:
    return draw_bars(memory_bars(rows, limit), "Memory", "what ranks hold")


def test_parts_stand_one_behind_the_other_and_are_as_long_as_their_bytes() -> None:
    found = boxes(drawn([("a", TERMS), ("b <&>", TERMS)], 80 * GIB))
    tips = [
        "a: parameters 10.00 GiB",
        "a: gradients 20.00 GiB",
        "a: activations 30.00 GiB",
    ]
    assert list(found)[:3] == tips
    assert list(found)[3].startswith("b <&>: ")
    places = [found[tip] for tip in tips]
    widths = [place[2] for place in places]
    assert widths == pytest.approx([widths[0] * part for part in (1, 2, 3)], abs=0.03)
    for one, after in pairwise(places):
        assert after[0] == pytest.approx(one[0] + one[2], abs=0.02)


def test_the_line_of_the_device_stands_where_its_memory_ends() -> None:
    drawing = drawn([("a", TERMS)], 40 * GIB)
    line = next(one for one in root_of(drawing).iter() if one.tag.endswith("line"))
    places = list(boxes(drawing).values())
    left, end = places[0][0], places[-1][0] + places[-1][2]
    assert float(line.attrib["x1"]) == pytest.approx(left + (end - left) * 40 / 60, abs=0.03)
    assert "The line is the memory of a device: 40.00 GiB." in texts(drawing)
    assert "150.0 %" in texts(drawing)


def test_kinds_that_nothing_has_are_not_in_the_key() -> None:
    said = texts(drawn([("a", TERMS)], 0.0))
    assert said[:3] == ["parameters", "gradients", "activations"]
    assert not any("memory of a device" in one for one in said)


amounts = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.floats(1.0, 1e14))
names = st.text(max_size=30)


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.tuples(names, st.dictionaries(names, amounts, max_size=14)), max_size=4),
    st.one_of(st.just(0.0), st.floats(1.0, 1e13)),
)
def test_any_bars_are_on_the_paper_and_words_are_clear(
    rows: list[tuple[str, dict[str, float]]], limit: float
) -> None:
    drawing = drawn(rows, limit)
    assert_words_are_clear(drawing)
    for x, _, width, _ in boxes(drawing).values():
        assert x + width <= PAGE + 0.1


@pytest.mark.parametrize("value", [nan, inf, -1.0, -inf])
def test_what_is_no_length_is_not_drawn(value: float) -> None:
    row = BarRow(
        label=HOSTILE,
        values=(value, 1.0),
        texts=("?", "1 B"),
        total=value,
        total_text="?",
        share_text="",
        over=False,
    )
    figure = BarsFigure(kinds=("one", "other"), limit=0.0, limit_text="", rows=(row,))
    drawing = draw_bars(figure, HOSTILE, HOSTILE)
    assert [tip.split(": ")[1] for tip in boxes(drawing) if ": " in tip] == ["other 1 B"]
    assert_words_are_clear(drawing)


def test_fills_are_those_of_the_page() -> None:
    style = (Path(__file__).parents[3] / "web" / "src" / "styles.css").read_text(encoding="utf-8")
    for place, fill in enumerate(TINTS):
        assert f"--k{place}: {fill};" in style
