"""Marks of an axis are round, lie on it, and can be told from one another."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echelon.page.drawn.lines import round_step, seconds_text, step_axis, value_axis
from tests.walks import examples


@settings(max_examples=examples(50))
@example(1.7120886981567835e308, 1.7120886998688722e308, "s")
@example(0.0, 1.5e308, "bytes")
@example(0.0, 5e-324, "s")
@example(1e15, 1e15 + 1, "s")
@given(st.floats(allow_nan=True), st.floats(allow_nan=True), st.sampled_from(["s", "bytes"]))
def test_any_two_values_have_an_axis_around_them(one: float, other: float, unit: str) -> None:
    low, high = sorted((one, other))
    axis = value_axis(low, high, unit)
    assert axis.low < axis.high
    assert 1 <= len(axis.marks) <= 13
    names = [name for _, name in axis.marks]
    assert all(first < second for (first, _), (second, _) in pairwise(axis.marks))
    if -1e300 < low <= high < 1e300 and high - low > 1e-3 * abs(high):
        hair = 1e-9 * (high - low)
        assert axis.low - hair <= low <= high <= axis.high + hair
        assert len(set(names)) == len(names)


def test_steps_are_whole_and_all_inside() -> None:
    axis = step_axis(1, 10_000)
    assert [name for _, name in axis.marks] == ["2000", "4000", "6000", "8000", "10000"]
    assert step_axis(3, 3).place(3, 0, 100) == 50
    assert all(name.isdigit() for _, name in step_axis(1, 4).marks)


def test_steps_of_an_axis_are_1_2_and_5() -> None:
    assert [round_step(x) for x in (0.011, 0.3, 1.0, 4.0, 700.0)] == pytest.approx(
        [0.02, 0.5, 1.0, 5.0, 1000.0]
    )


@pytest.mark.parametrize(
    ("seconds", "span", "says"),
    [
        (0.1266, 0.3798, "126.6 ms"),
        (0.0, 0.3798, "0.0 ms"),
        (12.5, 20.0, "12.50 s"),
        (0, 0, "0.000 s"),
    ],
)
def test_seconds_have_the_digits_of_their_scale(seconds: float, span: float, says: str) -> None:
    assert seconds_text(seconds, span) == says
