"""Ranks of these tests are forked from a process that has imported torch, as elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def real_fork_server() -> None:
    """Leave the fork server as `tests/conftest.py` has it; other tests start the real one."""
