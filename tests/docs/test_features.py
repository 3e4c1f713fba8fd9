"""The pages of features are what their tables say, and what they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from echelon.config.schema import SETTINGS
from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.schedule.build import SCHEDULES
from tests.docs.features import CONTEXT, FEATURES, PAGES, PIPELINES, Page

TESTS = Path(__file__).parents[1]
INTEROP = TESTS.parent / "src" / "echelon" / "interop"
NAMED = {cell.test for page in PAGES for cell in page.cells() if cell.test}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_the_table(page: Page) -> None:
    assert page.file.read_text(encoding="utf-8") == page.text(), "python -m tests.docs.features"


@pytest.mark.system("S50")
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
    files = (*INTEROP.rglob("*.py"), *INTEROP.rglob("keys.toml"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
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


def test_every_way_for_queries_to_meet_keys_has_a_row() -> None:
    ways = CONTEXT.rows()["Ways for queries to meet keys"].values()
    shown = [row["echelon"].words for row in ways]
    for kind in CONTEXT_KINDS:
        assert sum(f"`{kind}`" in words for words in shown) == 1, kind


def torch_source(pattern: str) -> str:
    """Return the source of installed torch in the files of a pattern."""
    files = list(Path(torch.__file__).parent.glob(pattern))
    assert files, pattern
    return "".join(file.read_text(encoding="utf-8") for file in files)


RING = "distributed/tensor/experimental/_context_parallel/*.py"
FLEX = "nn/attention/flex_attention.py"


@pytest.mark.parametrize(
    ("page", "patterns", "classes"),
    [
        (PIPELINES, ("distributed/pipelining/*.py",), r"^class (Schedule\w+)\("),
        (CONTEXT, (RING, FLEX), r"^class (_\w+)\(_LoadBalancer\)"),
    ],
    ids=lambda value: value.name if isinstance(value, Page) else "",
)
def test_what_torch_is_said_to_have_it_has(
    page: Page, patterns: tuple[str, ...], classes: str
) -> None:
    source = "".join(map(torch_source, patterns))
    words = " ".join(cell.words for cell in page.cells() if cell.column == "torch")
    named = re.findall(r"`(\w+)[^`]*`", words)
    assert len(named) > 12
    assert {name for name in named if not re.search(rf"\b{name}\b", source)} == set()
    there = set(re.findall(classes, source, re.MULTILINE))
    assert there
    assert there - set(named) == set(), "torch has one that the page does not name"


def test_torch_splits_no_attention_of_a_cpu_that_trains() -> None:
    assert "_scaled_dot_product_flash_attention.default" in torch_source(RING)
    assert "_for_cpu" not in torch_source(RING)
    assert "FlexAttention does not support backward on CPU" in torch_source(FLEX)
