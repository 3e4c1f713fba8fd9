"""A package that is missing is an error that says what to install."""

from __future__ import annotations

import sys

import pytest

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
    assert raised.value.problems[0].works == ("pip install 'echelon[data]'",)
    assert "reading corpus.parquet needs the package pyarrow" in str(raised.value)
