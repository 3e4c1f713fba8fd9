"""The table of threads and ranks: every cell is there, and comes from what exists."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest

from echelon.core.rulebook import all_rules
from tests.docs.data_parallel.page import COLUMNS, PAGE, ROOT, RUN, figures, rows, text

CELLS = [cell for row in rows().values() for cell in row.values()]


@pytest.mark.system("S50")
def test_the_page_is_the_table() -> None:
    """S05, L10: the comparison is generated, not typed."""
    assert PAGE.read_text(encoding="utf-8") == text(), "python -m tests.docs.data_parallel.page"


def test_no_cell_is_empty() -> None:
    """Golden 004-13: the row about ease of use had one cell for two columns."""
    assert all(row.keys() == COLUMNS.keys() for row in rows().values())
    assert all(words.strip() and source for words, source in CELLS)


@pytest.mark.parametrize("source", sorted({source for _, source in CELLS}))
def test_every_source_exists(source: str) -> None:
    kind, _, name = source.partition(":")
    if kind == RUN:
        assert figures()["threads"].keys() == figures()["ranks"].keys()
    elif kind == "rule":
        assert name in {rule.id for rule in all_rules()}
    elif kind == "formula":
        file, _, function = name.rpartition(".")
        assert callable(getattr(import_module(f"echelon.{file}"), function))
    else:
        assert kind == "test"
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_bytes_that_were_measured_are_those_of_the_formulas() -> None:
    for name in ("threads", "ranks"):
        assert figures()[name]["primary_bytes"] == figures()[name]["formula_bytes"]
