"""Memory bars: lengths are bytes, the device is a line, and what does not fit is seen."""

from __future__ import annotations

import re
from math import nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.planner.view.figure_text import bars_lines
from echelon.planner.view.plan_figures import memory_bars
from echelon.planner.view.terms import MOST_TERMS_SHOWN, term_styles
from tests.planner.view.figures import assert_narrow, text_of
from tests.walks import examples

GIB = 2.0**30


TERMS = {"parameters": 10 * GIB, "gradients": 20 * GIB, "activations": 30 * GIB, "slack": 0.0}


amounts = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.floats(1.0, 1e14))


names = st.one_of(st.sampled_from(sorted(TERMS)), st.text())


rows_of_any_kind = st.lists(
    st.tuples(st.text(), st.dictionaries(names, amounts, max_size=16)), max_size=6
)


def _bar(text: str, label: str) -> str:
    line = next(line for line in text.splitlines() if line.startswith(label))
    return line[len(label) :].strip().split("  ")[0]


@settings(max_examples=examples(60))
@given(rows_of_any_kind, st.one_of(st.just(0.0), st.floats(1.0, 1e13)))
def test_anything_is_drawn_within_80_columns(
    rows: list[tuple[str, dict[str, float]]], limit: float
) -> None:
    bars = memory_bars(rows, limit)
    assert_narrow(text_of(bars_lines(bars)))
    for row, (_, terms) in zip(bars.rows, rows, strict=True):
        assert row.total == pytest.approx(sum(terms.values()))


def test_columns_of_a_bar_are_proportional_to_bytes() -> None:
    rows = [("a", TERMS), ("b", {"gradients": 60 * GIB})]
    text = text_of(bars_lines(memory_bars(rows, 80 * GIB)))
    bar, other = _bar(text, "a  "), _bar(text, "b  ")
    counts = [bar.count(letter) for letter in "PGA"]
    assert counts[1] == pytest.approx(2 * counts[0], abs=1)
    assert counts[2] == pytest.approx(3 * counts[0], abs=1)
    assert bar.index("P") < bar.index("G") < bar.index("A")
    assert other.count("G") == sum(counts)
    assert "S" not in bar


def test_what_a_device_has_no_room_for_is_lower_case_behind_the_line() -> None:
    text = text_of(bars_lines(memory_bars([("a", TERMS), ("b", {"parameters": GIB})], 45 * GIB)))
    inside, beyond = _bar(text, "a  ").split("|")
    assert beyond == "a" * len(beyond) != ""
    assert inside.isupper()
    assert len(beyond) / len(inside) == pytest.approx(1 / 3, abs=0.05)
    assert "133.3 %" in text
    assert "45.00 GiB; lower case" in text


def test_a_byte_too_much_is_seen() -> None:
    bars = memory_bars([("a", {"parameters": 80 * GIB + 1})], 80 * GIB)
    assert "P|p" in text_of(bars_lines(bars))
    assert ">100 %" in text_of(bars_lines(bars))
    whole = memory_bars([("a", {"parameters": 80 * GIB})], 80 * GIB)
    assert "p" not in _bar(text_of(bars_lines(whole)), "a  ")


def test_the_table_below_is_of_the_fullest_row_and_adds_up() -> None:
    text = memory_bars([("a", {"slack": GIB / 3}), ("b", {"slack": GIB, "logits": GIB / 3})], 0.0)
    table = text_of(bars_lines(text)).split("\n\n")[1]
    assert "in b" in table
    found = dict(re.findall(r"(slack|logits|total) +([\d.]+) GiB", table))
    assert found == {"slack": "1.00", "logits": "0.33", "total": "1.33"}


def test_nothing_is_still_a_picture() -> None:
    for rows in ([], [("a", {})]):
        bars = memory_bars(rows, 0.0)
        assert_narrow(text_of(bars_lines(bars)))
    assert text_of(bars_lines(memory_bars([], 1.0))) == "(no ranks)\n"
    assert "Nothing is held." in text_of(bars_lines(memory_bars([("a", {})], 1.0)))


def test_many_kinds_become_other_and_nothing_is_lost() -> None:
    terms = {f"kind {place}": 2.0**place for place in range(40)}
    bars = memory_bars([("a", terms)], 2.0**41)
    assert len(bars.kinds) == MOST_TERMS_SHOWN
    assert bars.kinds[-1] == "other"
    assert bars.rows[0].total == 2.0**40 - 1
    assert bars.rows[0].values[-1] == 2.0**29 - 1


def test_no_two_kinds_share_a_letter() -> None:
    kinds = term_styles(["optimizer", "optimizer state", "parameters", "pages", "12"])
    letters = [kind.letter for kind in kinds]
    assert letters == ["O", "T", "P", "A", "B"]


@pytest.mark.parametrize(("held", "limit"), [(-1.0, 1.0), (nan, 1.0), (1.0, -1.0), (1.0, nan)])
def test_what_is_no_amount_is_refused(held: float, limit: float) -> None:
    with pytest.raises(ValueError, match="not a number from 0 up"):
        memory_bars([("a", {"slack": held})], limit)
