"""What all tests share: ranks that are started once per session, and only when asked for."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from echelon.launch.pool import RankPool


def pytest_configure() -> None:
    """Take Ctrl-C, and let no example be too slow: a busy machine is no fault.

    What a shell starts in its background ignores Ctrl-C, and children inherit that.
    """
    settings.register_profile("house", deadline=None)
    settings.load_profile("house")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Yield up to eight local ranks; each worker of a parallel test run has its own."""
    with RankPool(8) as pool:
        yield pool
