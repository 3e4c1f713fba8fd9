"""The process that forks ranks: it tells of starts and ends, and takes its ranks with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import pytest

from echelon.launch.local.fork_server import process_name
from echelon.launch.local.messages import (
    Channel,
    ForkServerReady,
    ProcessExited,
    RankSlot,
    RankStarted,
    channel_pair,
)

SERVER = """
import os, sys, time
from echelon.launch.local import fork_server
fork_server.PRELOADED = {modules!r}
def become(slot, descriptors, ours, parent):
    os.write(descriptors[0], str((slot.rank, os.getppid() == parent)).encode())
    if slot.rank == 1:
        raise SystemExit("an error of a rank")
    while slot.rank == 2:
        time.sleep(1)
fork_server._become_rank = become
sys.exit(fork_server.main(int(sys.argv[1]), sys.argv[2:]))
"""


@dataclass(slots=True)
class Supervisor:
    """Hear the fork server, message by message."""

    control: Channel
    heard: list[object] = field(default_factory=list[object])

    def hear(self) -> object:
        """Return the next message."""
        deadline = time.monotonic() + 10.0
        while not self.heard and time.monotonic() < deadline:
            self.heard += self.control.receive(0.1)
        return self.heard.pop(0)

    def start(self, rank: int) -> tuple[int, str]:
        """Have a rank forked; return its process id and what it writes first."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            slot = RankSlot(rank=rank, log_path=os.devnull)
            self.control.send_with_descriptors(slot, [theirs.fileno()])
            started = self.hear()
            assert isinstance(started, RankStarted)
            assert started.rank == rank
            return started.pid, ours.recv(100).decode()


@contextmanager
def server(
    *modules: str, more: tuple[str, ...] = ()
) -> Iterator[tuple[Supervisor, subprocess.Popen[bytes]]]:
    """Yield the channel to a fork server that imports `modules` and `more` only, and its process.

    `more` are those that one server is asked for.
    """
    control, theirs = channel_pair(send_timeout_s=5.0)
    command = [sys.executable, "-c", SERVER.format(modules=modules), str(theirs.fileno()), *more]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            yield Supervisor(control), process
        finally:
            control.close()
            assert process.wait(10.0) == 0


def test_ranks_are_forked_and_their_ends_told() -> None:
    with server("json") as (supervisor, process):
        assert supervisor.hear() == ForkServerReady("")
        pid, said = supervisor.start(0)
        assert said == "(0, True)"
        assert supervisor.hear() == ProcessExited(pid, 0)
        pid, _ = supervisor.start(1)
        assert supervisor.hear() == ProcessExited(pid, 1)
        pid, _ = supervisor.start(2)
        assert psutil.Process(pid).ppid() == process.pid
    # It ended with its supervisor, and took the rank that was alive with it.
    deadline = time.monotonic() + 10.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_imported_is_told() -> None:
    with server("no_such_module") as (supervisor, _):
        ready = supervisor.hear()
    assert ready == ForkServerReady(
        "cannot import no_such_module: No module named 'no_such_module'"
    )


@pytest.mark.slow
def test_one_server_may_be_asked_to_import_more() -> None:
    with server("json", more=("no_such_module",)) as (supervisor, _):
        ready = supervisor.hear()
    assert isinstance(ready, ForkServerReady)
    assert "no_such_module" in ready.problem


@pytest.mark.parametrize(("rank", "name"), [(0, "rank-0000"), (12, "rank-0012")])
def test_the_name_of_a_rank_in_lists_of_processes(rank: int, name: str) -> None:
    assert process_name(rank) == name
