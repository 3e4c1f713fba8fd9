"""What all tests share: ranks that are started once per session, and only when asked for."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from echelon.cli import output as stderr
from echelon.launch.local import rank_processes
from echelon.launch.local.supervisor import RankPool
from tests.file_seconds import begin_with_the_longest
from tests.fork_template import ForkTemplate
from tests.walks import QUICK_EXAMPLES, left_to_all

pytest_plugins = ("tests.workers", "tests.slow_eighth")


def pytest_configure(config: pytest.Config) -> None:
    """Take Ctrl-C, and let no example be too slow: a busy machine is no fault.

    What a shell starts in its background ignores Ctrl-C, and children inherit that. Where slow
    tests are left out, Hypothesis draws fewer examples, too.
    """
    # Where readline is loaded, as in what starts parallel workers, children inherit its 80 columns.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # Triton decides when it is imported whether it interprets kernels, and PyTorch may import it.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    fewer = config.getoption("markexpr") == "not slow"
    settings.register_profile("house", deadline=None, max_examples=QUICK_EXAMPLES if fewer else 100)
    settings.load_profile("house")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what is left to `make test-all`; workers begin with the long files."""
    for item in left_to_all(items):
        item.add_marker(pytest.mark.slow)
    if config.getoption("workers"):
        begin_with_the_longest(items)


def pytest_collection_finish() -> None:
    """Leave all that was collected out of the search for garbage, which would go over it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Start each test from one seed, so that what it draws does not depend on those before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def no_progress_by_the_clock() -> Iterator[None]:
    """Show no progress of work that takes over a second, as on a busy machine any may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stderr, "SHOWN_AFTER_S", 1e6)
        yield


@pytest.fixture(scope="session", autouse=True)
def fork_template() -> Iterator[None]:
    """Fork the fork server of each run in this process from one that has imported torch."""
    if not hasattr(os, "pidfd_open"):  # only Linux has it
        yield
        return
    template = ForkTemplate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "start_fork_server", template.start_fork_server)
        yield
    template.close()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Yield up to eight local ranks; each worker of a parallel test run has its own."""
    with RankPool(8) as pool:
        yield pool
