"""The waterfall: bars join from zero to the total, and the numbers add up to it exactly."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.planner.view.document import WaterfallRow
from echelon.planner.view.figure_text import waterfall_lines
from echelon.planner.view.plan_figures import waterfall
from echelon.planner.view.terms import tone_of
from tests.planner.view.figures import assert_narrow, text_of
from tests.walks import examples

STEP = {
    "matmul": 4.0,
    "attention": 1.0,
    "host": 0.03,
    "tensor": 2.0,
    "context": 0.0,
    "bubble": 1.5,
    "gradients": 1.44,
    "fixed": 0.03,
}


seconds = st.one_of(st.just(0.0), st.floats(1e-12, 1e-3), st.floats(0.0, 1e6))


names = st.one_of(st.sampled_from(sorted(STEP)), st.text())


_NUMBERS = re.compile(r"  ([\d,.]+) (?:s|ms|us|ns)  +([\d.]+) %$")


def _stop(row: WaterfallRow) -> float:
    return row.start + sum(part.seconds for part in row.parts)


def _numbers(text: str) -> list[tuple[Fraction, Fraction]]:
    found = (_NUMBERS.search(line) for line in text.splitlines())
    return [(Fraction(one[1].replace(",", "")), Fraction(one[2])) for one in found if one]


@settings(max_examples=examples(60))
@given(st.dictionaries(names, seconds, max_size=16))
def test_any_step_fits_80_columns_and_its_numbers_add_up(terms: dict[str, float]) -> None:
    fall = waterfall(terms)
    assert_narrow(text_of(waterfall_lines(fall)))
    assert fall.total == pytest.approx(sum(terms.values()))
    for bar, after in pairwise(fall.rows):
        assert after.start == pytest.approx(_stop(bar))
    if fall.rows:
        rows = _numbers(text_of(waterfall_lines(fall)))
        count = len(fall.rows)
        for column in (0, 1):
            total = rows[count][column]
            assert sum(row[column] for row in rows[:count]) == total
            assert sum(row[column] for row in rows[count + 1 :]) == total
        assert fall.rows[0].start == 0
        assert _stop(fall.rows[-1]) == pytest.approx(fall.total)


def test_terms_keep_their_order_and_small_ones_are_other() -> None:
    fall = waterfall(STEP)
    labels = [bar.label for bar in fall.rows]
    assert labels == ["matmul", "attention", "tensor", "bubble", "gradients", "other"]
    assert fall.others == ("host", "fixed")
    text = text_of(waterfall_lines(fall))
    assert "other: host, fixed" in text
    assert "total" in text
    assert re.search(r"^total +10\.000 s  100\.0 %$", text, re.MULTILINE)
    assert re.search(r"^other +\.+ +0\.060 s +0\.6 %$", text, re.MULTILINE)


def test_three_tones_say_what_the_seconds_are() -> None:
    text = text_of(waterfall_lines(waterfall(STEP)))
    assert re.search(r"^= compute +5\.000 s +50\.0 %$", text, re.MULTILINE)
    assert re.search(r"^# exposed communication +3\.440 s +34\.4 %$", text, re.MULTILINE)
    assert re.search(r"^\. idle +1\.560 s +15\.6 %$", text, re.MULTILINE)
    assert re.search(r"^matmul +=+ ", text, re.MULTILINE)
    assert re.search(r"^tensor +#+ ", text, re.MULTILINE)
    assert re.search(r"^bubble +\.+ ", text, re.MULTILINE)
    assert tone_of("a term of tomorrow") == "idle"


def test_a_mark_starts_where_the_last_bar_ended() -> None:
    lines = text_of(waterfall_lines(waterfall(STEP))).splitlines()[:5]
    spans = [re.search(r"(?<=  )[=#.]+(?=  )", line) for line in lines]
    for one, after in pairwise(spans):
        assert one is not None
        assert after is not None
        assert one.end() == after.start()


def test_other_of_two_tones_has_two_parts() -> None:
    fall = waterfall({"matmul": 1.0, "messages": 0.001, "optimizer": 0.001})
    parts = {part.tone: part.seconds for part in fall.rows[-1].parts}
    assert parts == {"compute": 0.001, "communication": 0.001}


@pytest.mark.parametrize("terms", [{}, {"matmul": 0.0}])
def test_no_seconds_are_still_a_picture(terms: dict[str, float]) -> None:
    fall = waterfall(terms)
    assert text_of(waterfall_lines(fall)) == "(a step takes no time)\n"


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="term 'bubble' is -1"):
        waterfall({"bubble": -1.0})
