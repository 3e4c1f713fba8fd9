"""Values lie between the ends of a scale, and its axis has round marks."""

from __future__ import annotations

import pytest

from echelon.core.svg import text_width
from echelon.planner.view.scale import TEXT, Scale, shortened


def test_values_lie_in_proportion() -> None:
    scale = Scale(left=100, right=300, span=50)
    assert [scale.x(value) for value in (0, 25, 50)] == [100, 200, 300]
    assert Scale(left=100, right=300, span=0).x(7) == 100


@pytest.mark.parametrize("span", [0.004, 1.0, 12345.0])
def test_an_axis_names_its_unit_once(span: float) -> None:
    marks = [*Scale(left=0, right=700, span=span).axis(10, "s")]
    labels = [mark for mark in marks if mark.startswith("<text")]
    assert labels
    assert sum("s</text>" in mark for mark in labels) == 1


def test_words_are_shortened_to_a_width() -> None:
    assert shortened("abc", 100) == "abc"
    cut = shortened("a" * 100, 80)
    assert cut.endswith("..")
    assert text_width(cut, TEXT) <= 80
