"""The version stands in one place, and the hash is one of the source as it is."""

from __future__ import annotations

import re

import pytest

import echelon
from echelon.core import version


def test_the_package_tells_the_version_of_core() -> None:
    assert echelon.__version__ == version.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version.__version__)


def test_the_hash_is_that_of_what_files_hold(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hash_of(text: str) -> str:
        root = tmp_path_factory.mktemp("package")
        (root / "core").mkdir()
        (root / "core" / "version.py").write_text(text)
        (root / "notes.txt").write_text(root.name)
        monkeypatch.setattr(version, "__file__", str(root / "core" / "version.py"))
        return version.source_hash()

    assert re.fullmatch("[0-9a-f]{64}", hash_of("a = 1\n"))
    assert hash_of("a = 1\n") == hash_of("a = 1\n") != hash_of("a = 2\n")
