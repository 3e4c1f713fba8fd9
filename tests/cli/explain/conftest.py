"""What tests of pages share."""

from __future__ import annotations

import pytest


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give pages so many columns that their sentences stay on one line."""
    monkeypatch.setenv("COLUMNS", "160")
