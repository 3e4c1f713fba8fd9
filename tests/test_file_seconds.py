"""The order of files in a parallel run, and the table that it comes from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.file_seconds import begin_with_the_longest, read_results, recorded, table

ROOT = Path(__file__).parent.parent

RESULTS = """\
<testsuites><testsuite>
<testcase classname="tests.core.test_mesh" name="test_a[1]" time="3.5" />
<testcase classname="tests.core.test_mesh" name="test_b" time="2.0" />
<testcase classname="tests.cli.test_main.TestThat" name="test_c" time="40.25" />
<testcase classname="tests.test_surface" name="test_d" time="0.5" />
</testsuite></testsuites>
"""


def test_long_files_come_first_and_tests_of_a_file_keep_their_order() -> None:
    first, *_, second = recorded()
    names = ["tests/no.py::b", f"{second}::b", f"{second}::a", "tests/no.py::a", f"{first}::z"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    begin_with_the_longest(items)
    found = [item.nodeid for item in items]
    assert found == [f"{first}::z", f"{second}::b", f"{second}::a", "tests/no.py::b", names[3]]


def test_the_table_is_that_of_the_results(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    spent = read_results(tmp_path / "results.xml")
    assert spent == {
        "tests/cli/test_main.py": 40.25,
        "tests/core/test_mesh.py": 5.5,
        "tests/test_surface.py": 0.5,
    }
    assert tomllib.loads(table(spent)) == {
        "seconds": {"tests/cli/test_main.py": 40, "tests/core/test_mesh.py": 6}
    }


@pytest.mark.parametrize("name", ["file_seconds", "slow_seconds"])
def test_recorded_files_exist(name: str) -> None:
    assert [file for file in recorded(name) if not (ROOT / file).is_file()] == []
