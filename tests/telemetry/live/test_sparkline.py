"""A row of marks is as high as its values, and never longer than its columns."""

from __future__ import annotations

from math import inf, nan

from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.telemetry.live.sparkline import ASCII, UNICODE, sparkline
from tests.walks import examples


def test_marks_are_as_high_as_their_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 80) == UNICODE
    assert sparkline([7, 6, 5, 4, 3, 2, 1, 0], 80, ASCII) == ASCII[::-1]
    assert len(set(ASCII)) == len(UNICODE)
    assert ASCII.isascii()


def test_more_values_than_columns_are_means() -> None:
    assert sparkline([0, 2, 7, 9], 2, ASCII) == ASCII[0] + ASCII[-1]
    assert sparkline([5.0] * 1000, 10, ASCII) == ASCII[4] * 10


def test_what_has_no_value_is_a_space() -> None:
    assert sparkline([0.0, None, nan, inf, 8.0], 80, ASCII) == f"{ASCII[0]}   {ASCII[-1]}"
    assert sparkline([], 80) == sparkline([None, nan], 80) == ""


@settings(max_examples=examples(40))
@given(st.lists(st.one_of(st.none(), st.floats()), max_size=50), st.integers(-1, 30))
def test_any_values_fit(values: list[float | None], columns: int) -> None:
    assert len(sparkline(values, columns)) <= max(columns, 1)
