# SPDX-License-Identifier: Apache-2.0
"""Local ranks as processes: start them, hear them, end them."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from echelon.core.cluster import Backend
from echelon.core.errors import EnvironmentProblem, RunFailed
from echelon.core.messages.notes import is_quiet
from echelon.core.rulebook.launch import LAUNCHER_LOST, PORT_IN_USE
from echelon.launch.environment import (
    LOCAL_HOST,
    local_environment,
    rank_environment,
    require_start_here,
)
from echelon.launch.gpus import dump_environment
from echelon.launch.local.messages import (
    Channel,
    ForkServerReady,
    Notice,
    ProcessExited,
    RankSlot,
    RankStarted,
    channel_pair,
)
from echelon.launch.local.output import log_name
from echelon.launch.root_cause import exit_text
from echelon.launch.stop import requests_held_back

if TYPE_CHECKING:
    from echelon.launch.process_group import Store

_BACKLOG = 1024  # connections
_SEND_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 120.0
_SILENT = (
    f"the process that forks ranks has not answered for {_START_TIMEOUT_S:g} s: this machine has "
    "too much to do"
)
_END_TIMEOUT_S = 10.0
_LEAVE_S = 5.0
_POLL_S = 0.1

M = TypeVar("M")


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """Hold one local rank: its process, its channel, and how it ended."""

    rank: int
    pid: int
    channel: Channel
    log_path: Path
    exit_code: int | None = None
    send_failed: bool = False

    def stopped(self) -> bool:
        """Return whether the process is stopped by a signal right now."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def send(self, message: object) -> None:
        """Send one message; one that is gone is heard of elsewhere."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process has ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def log_tail(self, *, most_lines: int) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - 200 * most_lines))
            lines = log.read().decode("utf-8", "replace").splitlines()
            return "\n".join(lines[-most_lines:])
        return ""


def listen_on_port(port: int) -> socket.socket:
    """Return a socket that listens on `port` (0: a free one); EnvironmentProblem if it is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOCAL_HOST, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        reason = "is in use" if error.errno == errno.EADDRINUSE else "may not be opened"
        raise EnvironmentProblem(
            PORT_IN_USE.problem(
                f"port {port} of this machine {reason}",
                key="MASTER_PORT",
                suggestions=["another port", "MASTER_PORT unset: a free one is taken"],
            )
        ) from error
    return listener


def start_fork_server(
    descriptor: int, environment: Mapping[str, str], preloaded: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the process that forks ranks; it is told to by the socket `descriptor`.

    It gets the environment of this process, with what `environment` sets, and imports the modules
    `preloaded` before it forks.
    """
    module = "echelon.launch.local.fork_server"
    # It ignores requests to stop; requests are held back until it has said so to the system.
    with requests_held_back():
        return subprocess.Popen(
            [sys.executable, "-m", module, str(descriptor), *preloaded],
            pass_fds=[descriptor],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
        )


@dataclass(slots=True)
class RankProcesses(AbstractContextManager["RankProcesses"]):
    """Own the fork server and the ranks that it forked; use as a context manager."""

    world_size: int
    """The most ranks that there will be: it decides how many threads each may use."""
    log_dir: Path
    """Folder of what each rank prints."""
    port: int = 0
    """Port to listen on for the store; 0: any that is free."""
    shown_rank: int | tuple[int, ...] | None = None
    """The rank whose output is shown too, if any, or those of which one speaks at a time."""
    backend: Backend = "gloo"
    """What ranks talk over; those on GPUs get an environment for them."""
    preloaded: tuple[str, ...] = ()
    """Modules that every rank will need: imported once, before the ranks are forked."""
    store_rank: int | None = 0
    """The rank that hosts the store: one that the others do not go on without. None: this process
    does."""
    each_wait: Callable[[], object] = lambda: None
    """Called several times a second while processes start; an exception of it ends them."""
    ranks: list[RankProcess] = field(default_factory=list[RankProcess])
    """The processes that live, by rank."""
    store_port: int = 0
    """The port that the store listens on."""
    _store: Store | None = None
    """The store, where this process hosts it."""
    _control: Channel | None = None
    """The channel to the fork server, once it runs."""
    _fork_server: subprocess.Popen[bytes] | None = None
    """The process of the fork server, once it runs."""
    _ready: ForkServerReady | None = None
    """What the fork server has said of whether it can fork; kept whoever listened just then."""

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self.close()

    def begin(self) -> None:
        """Have the fork server started, which then imports what it needs; do not wait for it."""
        if self._control is not None and not self._fork_server_gone():
            return
        self.close()
        require_start_here(self.backend)
        control, theirs = channel_pair(send_timeout_s=_SEND_TIMEOUT_S)
        environment = local_environment(self.world_size, backend=self.backend)
        self._fork_server = start_fork_server(theirs.fileno(), environment, self.preloaded)
        theirs.close()
        self._control, self._ready = control, None

    def ensure(self, count: int) -> None:
        """Have ranks 0 to `count` - 1 alive; EnvironmentProblem where they cannot start."""
        if self._control is not None:
            for _ in self.listen(0, len(self.ranks)):
                pass
        if any(rank.send_failed or rank.exit_code is not None for rank in self.ranks):
            self.discard(after_s=0.0)
        host = self.store_rank
        assert host is None or host < count or self.ranks, "who hosts the store is there"
        listener = None if self.ranks else listen_on_port(self.port)
        try:
            if listener is not None:
                self.store_port = listener.getsockname()[1]
                if host is None:
                    # torch is imported by a launcher that hosts a store, and by no other.
                    from echelon.launch.process_group import host_store

                    self._store = host_store(self.store_port, listener.detach())
            control = self._ready_fork_server()
            while len(self.ranks) < count:
                self.ranks.append(self._spawn(control, len(self.ranks), listener))
        finally:
            if listener is not None:
                listener.close()

    def respawn(self, rank: int) -> RankProcess:
        """Start a rank again whose process has ended or was told to; return the new process."""
        self.ranks[rank].channel.close()
        self.ranks[rank] = self._spawn(self._ready_fork_server(), rank, None)
        return self.ranks[rank]

    def listen(self, timeout_s: float, most: int) -> Iterator[tuple[RankProcess, object]]:
        """Yield what the first `most` ranks say within `timeout_s`; exits are only noted."""
        assert self._control is not None
        channels: list[Channel] = [
            rank.channel for rank in self.ranks[:most] if not rank.send_failed
        ]
        ready, _, _ = select.select([*channels, self._control], [], [], timeout_s)
        if self._control in ready:
            try:
                self._hear_fork_server(self._control, 0)
            except EOFError:
                raise self._launcher_lost() from None
        for rank in self.ranks[:most]:
            if rank.channel in ready:
                try:
                    for message in rank.channel.receive(0):
                        yield rank, message
                except EOFError:
                    rank.send_failed = True

    def let_leave(self) -> None:
        """Let all ranks leave: they flush what they wrote and end by themselves."""
        for rank in self.ranks:
            rank.send(Notice.NO_MORE_JOBS)
        self.discard(after_s=_LEAVE_S)

    def discard(self, after_s: float) -> None:
        """Kill all ranks that have not ended `after_s` from now, and forget them."""
        deadline = time.monotonic() + after_s
        killed = False
        while any(rank.exit_code is None for rank in self.ranks):
            now = time.monotonic()
            if now >= deadline and not killed:
                killed = True
                self._kill_all()
            if now >= deadline + _END_TIMEOUT_S or self._fork_server_gone():
                break
            for _ in self.listen(_POLL_S, len(self.ranks)):
                pass
        self._forget_all()

    def close(self) -> None:
        """End every process, the fork server last."""
        if self._fork_server is None or self._control is None:
            return
        self._kill_all()
        self._control.close()
        if self._ready is None:
            self._fork_server.kill()  # Its imports would delay its end.
        try:
            self._fork_server.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._fork_server.kill()
            self._fork_server.wait()
        self._forget_all()
        self._fork_server = self._control = None

    def _kill_all(self) -> None:
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)

    def _forget_all(self) -> None:
        for rank in self.ranks:
            rank.channel.close()
        self.ranks.clear()
        self._store = None

    def _fork_server_gone(self) -> bool:
        return self._fork_server is None or self._fork_server.poll() is not None

    def _ready_fork_server(self) -> Channel:
        self.begin()
        assert self._control is not None
        ready = self._ready or self._await(self._control, ForkServerReady)
        if ready.problem:
            self.close()
            raise EnvironmentProblem(LAUNCHER_LOST.problem(ready.problem))
        return self._control

    def _spawn(self, control: Channel, rank: int, listener: socket.socket | None) -> RankProcess:
        channel, theirs = channel_pair(send_timeout_s=_SEND_TIMEOUT_S)
        descriptors = [theirs.fileno()]
        if rank == self.store_rank:
            assert listener is not None
            descriptors.append(listener.fileno())
        log_path = self.log_dir / log_name(rank)
        shown = None if is_quiet() else self.shown_rank
        slot = RankSlot(
            rank=rank,
            log_path=str(log_path),
            shown=rank in shown if isinstance(shown, tuple) else rank == shown,
            environment=rank_environment(
                rank=rank, world_size=self.world_size, port=self.store_port
            )
            | dump_environment(self.log_dir, self.backend),
            path=tuple(sys.path),
        )
        try:
            control.send_with_descriptors(slot, descriptors)
            pid = self._await(control, RankStarted).pid
        except OSError:
            channel.close()
            raise self._launcher_lost() from None
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        return RankProcess(rank=rank, pid=pid, channel=channel, log_path=log_path)

    def _await(self, control: Channel, kind: type[M]) -> M:
        deadline = time.monotonic() + _START_TIMEOUT_S
        with contextlib.suppress(EOFError):
            while time.monotonic() < deadline:
                self.each_wait()
                for message in self._hear_fork_server(control, _POLL_S):
                    if isinstance(message, kind):
                        return message
            raise RunFailed(LAUNCHER_LOST.problem(_SILENT))
        raise self._launcher_lost()

    def _launcher_lost(self) -> RunFailed:
        """Return the error of a fork server that is gone, once the system says how it ended."""
        assert self._fork_server is not None, "it was there to be lost"
        try:
            how = exit_text(self._fork_server.wait(_END_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            how = "has closed its channel"
        verb = "was " if how.startswith("killed") else ""
        return RunFailed(LAUNCHER_LOST.problem(f"the process that forks ranks {verb}{how}"))

    def _hear_fork_server(self, control: Channel, timeout_s: float) -> list[object]:
        """Note which ranks have ended, and return what else the fork server says."""
        messages = control.receive(timeout_s)
        codes = {one.pid: one.code for one in messages if isinstance(one, ProcessExited)}
        for rank in self.ranks:
            rank.exit_code = codes.get(rank.pid, rank.exit_code)
        self._ready = next((m for m in messages if isinstance(m, ForkServerReady)), self._ready)
        return [one for one in messages if not isinstance(one, ProcessExited)]
