"""The pages of features are what their tables say, and what they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from echelon.config.schema import SETTINGS
from echelon.schedule.build import SCHEDULES
from tests.features import FEATURES, PAGES, PIPELINES, Page

TESTS = Path(__file__).parent
FOREIGN = TESTS.parent / "src" / "echelon" / "config" / "foreign"
NAMED = {cell.test for page in PAGES for cell in page.cells() if cell.test}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_the_table(page: Page) -> None:
    assert page.file.read_text(encoding="utf-8") == page.text(), "python -m tests.features"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_echelon_has_a_cell_with_a_test_in_every_row_and_columns_are_known(page: Page) -> None:
    found = [row for features in page.rows().values() for row in features.values()]
    assert found
    assert all({"echelon"} <= set(row) <= set(page.columns) for row in found)
    assert all(row["echelon"].test for row in found)


@pytest.mark.parametrize("test", sorted(NAMED))
def test_every_test_that_is_named_exists(test: str) -> None:
    file, _, function = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_is_named_exists(page: Page) -> None:
    ours = " ".join(cell.words for cell in page.cells() if cell.column == "echelon")
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)[ `]", ours))  # A call is no setting.
    assert named
    assert named - set(SETTINGS) == set()


def test_every_key_of_another_tool_is_one_that_is_imported() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in FOREIGN.glob("*.py"))
    words = " ".join(cell.words for cell in FEATURES.cells() if cell.column != "echelon")
    named = re.findall(r"`([a-z0-9_.]+)[^`]*`", words)
    keys = {part for name in named for part in name.split(".")}
    assert keys
    # The import puts the end of this one together with that of its neighbour.
    spelled = {key.removesuffix("_offload") for key in keys}
    assert {key for key in spelled if key not in source} == set()


def test_every_schedule_has_a_row() -> None:
    shown = " ".join(cell.words for cell in PIPELINES.cells() if cell.column == "echelon")
    # What only looks for faults is compared with nobody.
    assert {name for name in SCHEDULES if f"`{name}`" not in shown} == {"naive"}


def test_what_torch_is_said_to_have_it_has() -> None:
    import torch.distributed.pipelining as installed

    source = "".join(file.read_text() for file in Path(installed.__file__).parent.glob("*.py"))
    words = " ".join(cell.words for cell in PIPELINES.cells() if cell.column == "torch")
    named = re.findall(r"`(\w+)[^`]*`", words)
    assert len(named) > 12
    assert {name for name in named if not re.search(rf"\b{name}\b", source)} == set()
    classes = set(re.findall(r"^class (Schedule\w+)\(", source, re.MULTILINE))
    assert classes
    assert classes - set(named) == set(), "torch has a schedule that the page does not name"
