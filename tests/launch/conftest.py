"""Tests of what starts ranks start the real fork server, each time anew."""

from __future__ import annotations

import pytest

from echelon.launch.local import rank_processes

_START = rank_processes.start_fork_server


@pytest.fixture
def real_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what `tests/conftest.py` does for all other tests."""
    monkeypatch.setattr(rank_processes, "start_fork_server", _START)
