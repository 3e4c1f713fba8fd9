"""What all tests share: ranks that are started once per session, and only when asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from echelon.launch.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Yield up to eight local ranks; each worker of a parallel test run has its own."""
    with RankPool(8) as pool:
        yield pool
