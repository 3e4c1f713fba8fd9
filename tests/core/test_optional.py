"""A package that is missing is an error that says what to install."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import echelon
from echelon.core.errors import EnvironmentProblem
from echelon.core.optional import optional_package


def test_a_package_that_is_there_is_returned() -> None:
    assert optional_package("json", extra="data", purpose="nothing").loads("1") == 1


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem) as raised:
        optional_package("pyarrow", extra="data", purpose="reading corpus.parquet")
    assert raised.value.rules == ("package-installed",)
    assert raised.value.exit_code == 3
    assert raised.value.problems[0].suggestions == (
        "pip install '.[data]' in the checkout of Echelon",
    )
    assert "reading corpus.parquet needs the package pyarrow" in str(raised.value)


def test_nothing_advises_to_install_the_other_package_that_pypi_calls_echelon() -> None:
    folder = Path(echelon.__file__).parent
    files = [*folder.rglob("*.py"), *folder.rglob("*.toml")]
    other = re.compile(r"pip install (?:-\S+ )*'?echelon(?!-parallel)|(?<!-)\bechelon\[")
    assert [file for file in files if other.search(file.read_text())] == []
