"""The page of systems is what markers of tests say, and no row works without a test."""

from __future__ import annotations

from pathlib import Path

from tests.docs.systems.page import (
    PAGE,
    Evidence,
    System,
    evidence,
    page,
    problems,
    systems,
)

ROW = System(id="S01", title="One", system="a system", works="It works.")
TEST = Evidence(file="parallel/test_data.py", function="test_it_works")


def test_the_page_is_what_markers_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(systems(), evidence()), "python -m tests.docs.systems.page"


def test_no_row_works_without_a_test_and_every_marker_is_of_a_row() -> None:
    assert problems(systems(), evidence()) == []


def test_every_row_is_there_once_and_says_what_it_is() -> None:
    rows = systems()
    ids = [f"S{number:02}" for number in range(1, 61)]
    # Two figures have rows of their own.
    assert [row.id for row in rows] == [*ids, "E20", "F11", *(f"B{n:02}" for n in range(1, 11))]
    assert all(row.title and row.system and row.works.endswith(".") for row in rows)


def test_a_row_that_loses_its_test_and_a_marker_of_no_row_are_told() -> None:
    assert problems([ROW], {"S01": [TEST]}) == []
    assert problems([ROW], {}) == ["S01 works, and no test shows it"]
    (told,) = problems([ROW], {"S01": [TEST], "S99": [TEST]})
    assert told == "S99 is marked in parallel/test_data.py, and is no row"


def test_what_is_open_says_why_on_the_page() -> None:
    rows = [
        ROW,
        System(id="S02", title="One", system="another", works="It does.", open="not built"),
        System(id="S03", title="Two", system="a third", works="It does.", open="half of it"),
    ]
    assert problems(rows, {"S01": [TEST]}) == []
    text = page(rows, {"S01": [TEST]})
    assert "| works | [it works](../tests/parallel/test_data.py) |" in text
    assert "| S02 | another | It does. | not built | - |" in text
    assert "| open: half of it |" in text
    assert text.count("## ") == 2


def test_markers_are_read_from_the_source(tmp_path: Path) -> None:
    marked = '@pytest.mark.system("S01", "B02")\n@pytest.mark.slow\ndef test_a() -> None: ...\n'
    (tmp_path / "test_one.py").write_text(f"import pytest\n\n{marked}\ndef test_b(): ...\n")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "test_two.py").write_text(marked)
    one = Evidence(file="test_one.py", function="test_a")
    assert evidence(tmp_path) == {"S01": [one], "B02": [one]}
