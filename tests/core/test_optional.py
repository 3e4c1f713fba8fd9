"""A package that is missing is an error that says what to install."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

import echelon
from echelon.core import optional
from echelon.core.errors import EnvironmentProblem
from echelon.core.optional import (
    install_command,
    missing_package,
    optional_package,
    require_package,
)


def test_a_package_that_is_there_is_returned() -> None:
    assert optional_package("json", extra="data", purpose="nothing").loads("1") == 1


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem) as raised:
        optional_package("pyarrow", extra="data", purpose="reading corpus.parquet")
    assert raised.value.rules == ("package-installed",)
    assert raised.value.exit_code == 3
    assert raised.value.problems[0].suggestions == (install_command("data"),)
    assert "reading corpus.parquet needs the package pyarrow" in str(raised.value)


def test_a_checkout_is_installed_from_its_folder_and_a_wheel_from_the_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = Path(echelon.__file__).parents[2]
    assert install_command("data") == f"pip install -e {shlex.quote(f'{root}[data]')}"
    installed = tmp_path / "site-packages" / "echelon" / "core" / "optional.py"
    monkeypatch.setattr(optional, "__file__", str(installed))
    assert install_command("data") == "pip install 'echelon-parallel[data]'"


def test_a_package_is_looked_for_without_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    require_package("json", extra="data", purpose="nothing")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem, match="a table needs the package pyarrow"):
        require_package("pyarrow", extra="data", purpose="a table")
    problem = missing_package("nowhere.at_all", extra="data", purpose="nothing")
    assert problem is not None


def test_nothing_advises_the_package_of_others_or_a_file_of_the_checkout() -> None:
    folder = Path(echelon.__file__).parent
    files = [*folder.rglob("*.py"), *folder.rglob("*.toml")]
    # The index has another "echelon", and a wheel has neither a Makefile nor constraints.
    advised = re.compile(
        r"pip install [^\n]*(\bechelon(?!-parallel)\b|'?\.\[|-c constraints)"
        r"|in (the|its) checkout|\bmake (setup|docs|test|check|readme)\b"
    )
    found = [file for file in files if advised.search(file.read_text())]
    assert found == []
