"""Workers that share the files of tests: `pytest --workers 3`. Tests are collected once.

Each worker is a fork of the process that has collected, so that no import, no parameter and no
compiled assertion is made twice. A worker takes a file at a time from a pipe, the longest first,
and sends its reports to the process that it was forked from, which alone prints. Session fixtures
live once in each worker. The worker that ends in the middle of a test is that test's failure, and
another worker goes on with the file. With `--at-most SECONDS`, a file that was not begun by then is
left out, and named at the end.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, cast

import pytest

INDEX = struct.Struct("<I")
END_S = 60.0
"""Seconds that a worker has to end its session fixtures; it is killed after that."""
SPEAKERS = {"terminalreporter", "lfplugin", "nfplugin", "stepwiseplugin"}
"""Plugins that print or keep results, which the process that was forked from does alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this module."""
    group = parser.getgroup("workers", "files of tests shared by processes")
    group.addoption("--workers", type=int, default=0, help="processes (0: this one alone)")
    group.addoption("--at-most", type=float, metavar="SECONDS", help="begin no file after that")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers, where there are any to run."""
    count: int = session.config.getoption("workers") or 0
    failed = session.testsfailed and not session.config.option.continue_on_collection_errors
    if not count or failed or session.config.option.collectonly:
        return None
    files = [list(items) for _, items in groupby(session.items, key=file_of)]
    WorkerPool(session, files).run(min(count, len(files)))
    return True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the files that got no turn."""
    names = config.stash.get(LEFT_OUT, [])
    if names:
        terminalreporter.section(f"{len(names)} files got no turn in time")
        for name in names:
            terminalreporter.write_line(name)


LEFT_OUT = pytest.StashKey[list[str]]()
Place = tuple[int, int]
"""Index of a file, and of a test in it."""


def file_of(item: pytest.Item) -> str:
    """Return the name of the file that a test stands in."""
    return item.nodeid.partition("::")[0]


@dataclass(slots=True)
class Worker:
    """A process, and what it does now."""

    pid: int
    test: Place | None = None
    """The test that runs."""
    taken: int | None = None
    """Index of the file that was taken last."""
    ended: bool = False
    """True once nothing is left to do."""


@dataclass(slots=True)
class WorkerPool:
    """The workers of a session, and the pipe that they take files from."""

    session: pytest.Session
    files: Sequence[Sequence[pytest.Item]]
    workers: dict[Connection, Worker] = field(default_factory=dict)
    queue: int = -1
    """Descriptor of the pipe of indexes that no worker has taken."""

    def run(self, count: int) -> None:
        """Run all files by `count` workers, until the end or until the session is to stop."""
        limit: float | None = self.session.config.getoption("at_most")
        stop_at = None if limit is None else time.monotonic() + limit
        self.queue, write = os.pipe()
        os.write(write, b"".join(map(INDEX.pack, range(len(self.files)))))
        os.close(write)
        # In the numbered folder of this session, each worker gets one of its own.
        _temporary_paths(self.session.config).getbasetemp()
        try:
            for _ in range(count):
                self._start([])
            while self.workers:
                for ready in wait([*self.workers], timeout=1.0):
                    self._receive(cast("Connection", ready))
                if stop_at is not None and time.monotonic() > stop_at:
                    names = [file_of(self.files[index][0]) for index in _indexes(self.queue)]
                    self.session.config.stash[LEFT_OUT] = names
                    stop_at = None
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            self._end()
            os.close(self.queue)

    def places(self, file: int, first: int = 0) -> list[Place]:
        """Return the places of the tests of a file, from its `first` on."""
        return [(file, index) for index in range(first, len(self.files[file]))]

    def _start(self, begun: Sequence[Place]) -> None:
        """Fork a worker that first does the tests in `begun`."""
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # The thread of pyarrow's allocator: a fork starts it anew.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            for connection in (ours, *self.workers):
                connection.close()
            _work(self, begun, theirs)
        theirs.close()
        self.workers[ours] = Worker(pid, taken=begun[-1][0] if begun else None)

    def _receive(self, connection: Connection) -> None:
        worker = self.workers[connection]
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError):
            self._lost(connection)
            return
        config = self.session.config
        match kind:
            case "file":
                worker.taken = content
            case "test":
                worker.test = content
            case "report":
                report = config.hook.pytest_report_from_serializable(config=config, data=content)
                config.hook.pytest_runtest_logreport(report=report)
            case _:
                worker.ended = True

    def _lost(self, connection: Connection) -> None:
        """Forget a worker that has ended; one that had not finished is the failure of its test."""
        worker = self.workers.pop(connection)
        connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.ended:
            return
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        if worker.test is None:
            raise RuntimeError(f"A worker ended before its first test: {how}")
        file, index = worker.test
        item = self.files[file][index]
        words = f"The worker ended in this test: {how}."
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
        self.session.config.hook.pytest_runtest_logreport(report=report)
        left = self.places(file, index + 1)
        if worker.taken is not None and worker.taken != file:
            left += self.places(worker.taken)
        self._start(left)

    def _end(self) -> None:
        """End workers that still run, where the session stops early."""
        for worker in self.workers.values():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        kill_at = time.monotonic() + END_S
        while self.workers:
            for ready in wait([*self.workers], timeout=1.0):
                connection = cast("Connection", ready)
                try:
                    connection.recv()
                except (EOFError, ConnectionResetError):
                    os.waitpid(self.workers.pop(connection).pid, 0)
            if time.monotonic() > kill_at:
                for worker in self.workers.values():
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)


def _indexes(queue: int) -> Iterator[int]:
    """Yield indexes of files until none is left; no other process gets one that was yielded."""
    while taken := os.read(queue, INDEX.size):
        yield INDEX.unpack(taken)[0]


def _work(pool: WorkerPool, begun: Sequence[Place], parent: Connection) -> NoReturn:
    """Run files until none is left, and end this process without its parent's own endings."""
    code = 1
    try:
        _begin(pool.session.config, parent)
        _run_tests(pool, _places(pool, begun, parent), parent)
        pool.session._setupstate.teardown_exact(None)
        parent.send(("end", None))
        code = 0
    except (KeyboardInterrupt, BrokenPipeError, pytest.exit.Exception):
        with suppress(BaseException):
            pool.session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _begin(config: pytest.Config, parent: Connection) -> None:
    """Let a fork of a session capture for itself, and report to its parent alone."""
    plugins = config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    for plugin in plugins.get_plugins():
        name = plugins.get_name(plugin)
        if name in SPEAKERS or type(plugin).__name__ == "LogXML":
            plugins.unregister(plugin)
    plugins.register(_Reporter(config, parent), "worker-reporter")
    paths = _temporary_paths(config)
    paths._basetemp = paths.getbasetemp() / f"worker-{os.getpid()}"
    paths._basetemp.mkdir(0o700)


def _temporary_paths(config: pytest.Config) -> Any:
    return vars(config)["_tmp_path_factory"]


def _places(pool: WorkerPool, begun: Sequence[Place], parent: Connection) -> Iterator[Place]:
    """Yield tests; the next file is taken when its first test is asked for."""
    yield from begun
    for file in _indexes(pool.queue):
        parent.send(("file", file))
        yield from pool.places(file)


def _run_tests(pool: WorkerPool, places: Iterator[Place], parent: Connection) -> None:
    """Run tests; each is told which comes next, as fixtures that both use then stay."""
    following = next(places, None)
    while following is not None:
        place = following
        parent.send(("test", place))
        following = next(places, None)
        item = pool.files[place[0]][place[1]]
        after = None if following is None else pool.files[following[0]][following[1]]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


class _Reporter:
    """Send what a worker reports to the process that prints it."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self.config = config
        self.parent = parent

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.parent.send(("report", data))
