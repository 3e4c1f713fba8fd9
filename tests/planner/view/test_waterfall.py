"""The waterfall: bars join from zero to the total, and the numbers add up to it exactly."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.planner.view.kinds import tone_of
from echelon.planner.view.waterfall import waterfall
from echelon.planner.view.waterfall_svg import waterfall_svg
from tests.planner.view.figures import (
    assert_narrow,
    assert_texts_are_clear,
    number,
    rects,
    texts,
    tip,
)

STEP = {
    "products": 4.0,
    "attention": 1.0,
    "host": 0.03,
    "tensor": 2.0,
    "context": 0.0,
    "bubble": 1.5,
    "gradients": 1.44,
    "rest": 0.03,
}
seconds = st.one_of(st.just(0.0), st.floats(1e-12, 1e-3), st.floats(0.0, 1e6))
names = st.one_of(st.sampled_from(sorted(STEP)), st.text(max_size=40))
_NUMBERS = re.compile(r"  ([\d,.]+) (?:s|ms|us|ns)  +([\d.]+) %$")


def _numbers(text: str) -> list[tuple[Fraction, Fraction]]:
    found = (_NUMBERS.search(line) for line in text.splitlines())
    return [(Fraction(one[1].replace(",", "")), Fraction(one[2])) for one in found if one]


@settings(max_examples=60)
@given(st.dictionaries(names, seconds, max_size=16))
def test_any_step_fits_80_columns_and_its_numbers_add_up(terms: dict[str, float]) -> None:
    fall = waterfall(terms)
    assert_narrow(fall.text())
    figure = waterfall_svg(fall, title=" ".join(terms))
    assert_texts_are_clear(figure)
    assert fall.total == pytest.approx(sum(terms.values()))
    for bar, after in pairwise(fall.bars):
        assert after.start == pytest.approx(bar.stop)
    if fall.bars:
        rows = _numbers(fall.text())
        count = len(fall.bars)
        for column in (0, 1):
            total = rows[count][column]
            assert sum(row[column] for row in rows[:count]) == total
            assert sum(row[column] for row in rows[count + 1 :]) == total
        assert fall.bars[0].start == 0
        assert fall.bars[-1].stop == pytest.approx(fall.total)


def test_terms_keep_their_order_and_small_ones_are_other() -> None:
    fall = waterfall(STEP)
    labels = [bar.label for bar in fall.bars]
    assert labels == ["products", "attention", "tensor", "bubble", "gradients", "other"]
    assert fall.small() == ("host", "rest")
    text = fall.text()
    assert "other: host, rest" in text
    assert "total" in text
    assert re.search(r"^total +10\.000 s  100\.0 %$", text, re.MULTILINE)
    assert re.search(r"^other +\.+ +0\.060 s +0\.6 %$", text, re.MULTILINE)


def test_three_tones_say_what_the_seconds_are() -> None:
    text = waterfall(STEP).text()
    assert re.search(r"^= compute +5\.000 s +50\.0 %$", text, re.MULTILINE)
    assert re.search(r"^# exposed communication +3\.440 s +34\.4 %$", text, re.MULTILINE)
    assert re.search(r"^\. waiting +1\.560 s +15\.6 %$", text, re.MULTILINE)
    assert re.search(r"^products +=+ ", text, re.MULTILINE)
    assert re.search(r"^tensor +#+ ", text, re.MULTILINE)
    assert re.search(r"^bubble +\.+ ", text, re.MULTILINE)
    assert tone_of("a term of tomorrow") == "waiting"


def test_a_mark_starts_where_the_last_bar_ended() -> None:
    lines = waterfall(STEP).text().splitlines()[:5]
    spans = [re.search(r"(?<=  )[=#.]+(?=  )", line) for line in lines]
    for one, after in pairwise(spans):
        assert one is not None
        assert after is not None
        assert one.end() == after.start()


def test_boxes_are_as_long_as_their_seconds_and_join() -> None:
    figure = waterfall_svg(waterfall(STEP), title="a < b")
    found = [box for tone in ("compute", "communication", "waiting") for box in rects(figure, tone)]
    boxes = sorted(found, key=lambda box: number(box, "y"))
    assert [tip(box).split(":")[0] for box in boxes] == [
        "products",
        "attention",
        "tensor",
        "bubble",
        "gradients",
        "other (host, rest)",
    ]
    assert tip(boxes[2]) == "tensor: 2.000 s, 20.0 %, exposed communication"
    widths = [number(box, "width") for box in boxes]
    scale = widths[0] / 4
    assert widths[1:5] == pytest.approx([scale, 2 * scale, 1.5 * scale, 1.44 * scale], abs=0.02)
    for box, after in pairwise(boxes):
        end = number(box, "x") + number(box, "width")
        assert number(after, "x") == pytest.approx(end, abs=0.02)
    assert texts(figure, "rank")[-1] == "total"
    assert texts(figure, "key") == [
        "compute 50.0 %",
        "exposed communication 34.4 %",
        "waiting 15.6 %",
    ]


def test_other_of_two_tones_has_two_parts() -> None:
    fall = waterfall({"products": 1.0, "messages": 0.001, "optimizer": 0.001})
    assert fall.bars[-1].parts == {"compute": 0.001, "communication": 0.001}
    figure = waterfall_svg(fall)
    ends = [
        number(box, "x") for box in (rects(figure, "compute")[1], *rects(figure, "communication"))
    ]
    assert ends[0] < ends[1]


@pytest.mark.parametrize("terms", [{}, {"products": 0.0}])
def test_no_seconds_are_still_a_picture(terms: dict[str, float]) -> None:
    fall = waterfall(terms)
    assert fall.text() == "(a step takes no time)\n"
    assert_texts_are_clear(waterfall_svg(fall))


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="term 'bubble' is -1"):
        waterfall({"bubble": -1.0})
