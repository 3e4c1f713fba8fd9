"""Local ranks as processes: start them, hear them, end them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from echelon.core.errors import EnvironmentProblem, RunFailed
from echelon.core.rulebook.launch import LAUNCHER_LOST
from echelon.launch.channel import Channel, channel_pair
from echelon.launch.environment import local_environment, rank_environment
from echelon.launch.messages import Exited, Leave, NurseryReady, Seat, Spawned
from echelon.launch.output import log_name
from echelon.launch.ports import listen

_SEND_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 120.0
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
    deaf: bool = False

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


@dataclass(slots=True)
class Crew:
    """Own the nursery and the ranks that it forked; use as a context manager.

    `world_size` is the most ranks there will be: it decides how many threads each may use.
    """

    world_size: int
    log_dir: Path
    port: int = 0
    shown_rank: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    ranks: list[RankProcess] = field(default_factory=list[RankProcess])
    store_port: int = 0
    _control: Channel | None = None
    _nursery: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Crew:
        """Return the crew; nothing is started yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self.close()

    def ensure(self, count: int) -> None:
        """Have ranks 0 to `count` - 1 alive; EnvironmentProblem where they cannot start."""
        if self._control is not None:
            for _ in self.listen(0, len(self.ranks)):
                pass
        if any(rank.deaf or rank.exit_code is not None for rank in self.ranks):
            self.discard(after_s=0.0)
        listener = None if self.ranks else listen(self.port)
        try:
            control = self._start_nursery()
            while len(self.ranks) < count:
                self._spawn(control, len(self.ranks), listener)
        finally:
            if listener is not None:
                listener.close()

    def listen(self, timeout_s: float, most: int) -> Iterator[tuple[RankProcess, object]]:
        """Yield what the first `most` ranks say within `timeout_s`; exits are only noted."""
        assert self._control is not None
        channels: list[Channel] = [rank.channel for rank in self.ranks[:most] if not rank.deaf]
        ready, _, _ = select.select([*channels, self._control], [], [], timeout_s)
        if self._control in ready:
            self._hear_nursery(self._control)
        for rank in self.ranks[:most]:
            if rank.channel in ready:
                try:
                    for message in rank.channel.receive(0):
                        yield rank, message
                except EOFError:
                    rank.deaf = True

    def dismiss(self) -> None:
        """Let all ranks leave: they flush what they wrote and end by themselves."""
        for rank in self.ranks:
            rank.send(Leave())
        self.discard(after_s=_LEAVE_S)

    def discard(self, after_s: float) -> None:
        """Kill all ranks that have not ended `after_s` from now, and forget them."""
        deadline = time.monotonic() + after_s
        killed = False
        give_up = deadline + _END_TIMEOUT_S
        while any(rank.exit_code is None for rank in self.ranks):
            now = time.monotonic()
            if now >= deadline and not killed:
                killed = True
                for rank in self.ranks:
                    rank.signal(signal.SIGKILL)
            if now >= give_up or self._nursery_gone():
                break
            for _ in self.listen(_POLL_S, len(self.ranks)):
                pass
        for rank in self.ranks:
            rank.channel.close()
        self.ranks.clear()

    def close(self) -> None:
        """End every process, the nursery last."""
        if self._nursery is None or self._control is None:
            return
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
        self._control.close()
        try:
            self._nursery.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        for rank in self.ranks:
            rank.channel.close()
        self.ranks.clear()
        self._nursery = self._control = None

    def _nursery_gone(self) -> bool:
        return self._nursery is None or self._nursery.poll() is not None

    def _start_nursery(self) -> Channel:
        if self._control is not None and not self._nursery_gone():
            return self._control
        self.close()
        control, theirs = channel_pair(send_timeout_s=_SEND_TIMEOUT_S)
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "echelon.launch.nursery", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **local_environment(self.world_size), **self.environment},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._control = control
        ready = self._await(control, NurseryReady)
        if ready.problem:
            self.close()
            raise EnvironmentProblem(LAUNCHER_LOST.problem(ready.problem))
        return control

    def _spawn(self, control: Channel, rank: int, listener: socket.socket | None) -> None:
        channel, theirs = channel_pair(send_timeout_s=_SEND_TIMEOUT_S)
        descriptors = [theirs.fileno()]
        if rank == 0:
            assert listener is not None
            self.store_port = listener.getsockname()[1]
            descriptors.append(listener.fileno())
        log_path = self.log_dir / log_name(rank)
        seat = Seat(
            rank=rank,
            log_path=str(log_path),
            shown=rank == self.shown_rank,
            environment=rank_environment(
                rank=rank, world_size=self.world_size, port=self.store_port
            ),
            path=tuple(sys.path),
        )
        control.send_with_descriptors(seat, descriptors)
        theirs.close()
        spawned = self._await(control, Spawned)
        self.ranks.append(
            RankProcess(rank=rank, pid=spawned.pid, channel=channel, log_path=log_path)
        )

    def _await(self, control: Channel, kind: type[M]) -> M:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            found: M | None = None
            try:
                for message in control.receive(_POLL_S):
                    if isinstance(message, kind):
                        found = message
                    elif isinstance(message, Exited):
                        self._note(message)
            except EOFError:
                break
            if found is not None:
                return found
        code = self._nursery.poll() if self._nursery else None
        raise RunFailed(
            LAUNCHER_LOST.problem(f"the process that forks ranks ended with exit code {code}")
        )

    def _hear_nursery(self, control: Channel) -> None:
        try:
            for message in control.receive(0):
                if isinstance(message, Exited):
                    self._note(message)
        except EOFError:
            raise RunFailed(
                LAUNCHER_LOST.problem("the process that forks ranks ended, and the ranks with it")
            ) from None

    def _note(self, message: Exited) -> None:
        for rank in self.ranks:
            if rank.pid == message.pid:
                rank.exit_code = message.code
