"""Text on lines of a terminal is cut, padded and aligned by columns."""

from __future__ import annotations

from rich.cells import cell_len

from echelon.planner.view.figure_text import (
    pad_text,
    table_lines,
    truncate_text,
)
from tests.planner.view.figures import text_of


def test_text_is_cut_with_dots_by_columns() -> None:
    assert truncate_text("abcdef", 6) == "abcdef"
    assert truncate_text("abcdef", 5) == "abc.."
    assert truncate_text("abcdef", 2) == "ab"
    assert cell_len(truncate_text("\u6f22\u5b57\u6f22\u5b57", 5)) <= 5


def test_text_is_padded_on_either_side() -> None:
    assert pad_text("a", 3) == "a  "
    assert pad_text("a", 3, right=True) == "  a"
    assert pad_text("abcd", 3) == "abcd"


def test_a_table_has_aligned_columns() -> None:
    lines = table_lines([("name", "1"), ("x", "200")], right=(False, True))
    assert text_of(lines) == "name    1\nx     200\n"
