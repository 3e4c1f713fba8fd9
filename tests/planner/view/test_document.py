"""Records of a document: tables know their columns of numbers, bars add up."""

from __future__ import annotations

from echelon.core.units import decimal_bytes
from echelon.planner.view.document import BarRow, DataTable, Section
from echelon.planner.view.text_layout import section_text


def test_columns_of_numbers_stand_right() -> None:
    table = DataTable.of(
        ("what", "bytes", "share", "note"), [("a", 1, "-", "x"), (2, "10 B", 3, "")]
    )
    assert table.rows == (("a", "1", "-", "x"), ("2", "10 B", "3", ""))
    assert table.right == (1, 2)


def test_a_bar_has_the_sum_of_its_values() -> None:
    bar = BarRow.of("rank 0", (1000, 500), decimal_bytes)
    assert bar.values == (1000.0, 500.0)
    assert bar.total == 1500.0
    assert (*bar.texts, bar.total_text) == ("1.00 kB", "500 B", "1.50 kB")
    assert not bar.over


def test_a_section_is_text_with_its_sentence_table_and_notes() -> None:
    table = DataTable.of(("rank", "holds"), [("0", "1 B")])
    section = Section(id="a", title="A", summary="Each holds:", table=table, notes=("No more.",))
    assert section_text(section) == "Each holds:\n\nrank  holds\n0       1 B\n\nNo more."
    assert section_text(Section(id="b", title="B", summary="Nothing.")) == "Nothing."
