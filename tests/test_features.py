"""docs/features.md is what its table says, and what it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from echelon.config.schema import SETTINGS
from tests.features import COLUMNS, PAGE, cells, page, rows

TESTS = Path(__file__).parent
FOREIGN = TESTS.parent / "src" / "echelon" / "config" / "foreign"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.features writes it"


def test_echelon_has_a_cell_in_every_row_and_columns_are_known() -> None:
    found = [set(row) for features in rows().values() for row in features.values()]
    assert found
    assert all({"echelon"} <= row <= set(COLUMNS) for row in found)


@pytest.mark.parametrize("test", sorted({cell.test for cell in cells()}))
def test_every_test_that_is_named_exists(test: str) -> None:
    file, _, function = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_setting_that_is_named_exists() -> None:
    ours = " ".join(cell.words for cell in cells() if cell.column == "echelon")
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)[ `]", ours))  # A call is no setting.
    assert named
    assert named - set(SETTINGS) == set()


def test_every_key_of_another_tool_is_one_that_is_imported() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in FOREIGN.glob("*.py"))
    words = " ".join(cell.words for cell in cells() if cell.column != "echelon")
    named = re.findall(r"`([a-z0-9_.]+)[^`]*`", words)
    keys = {part for name in named for part in name.split(".")}
    assert keys
    # The import puts the end of this one together with that of its neighbour.
    spelled = {key.removesuffix("_offload") for key in keys}
    assert {key for key in spelled if key not in source} == set()
