"""Fork servers that are forked in their turn, from one process that has imported all they need.

A run on local ranks begins with a fork server, which imports torch: three seconds of CPU, and the
tests start well over a hundred runs. Here one process per test worker imports torch and our engine
once, and each fork server is a fork of it: with the environment, the folder and the output of the
test that asks for it. Ranks are forked from there as in any run. Tests of what starts ranks take
the real one (see `tests/launch/conftest.py`), and so does each command that a test starts as a
process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.launch.environment import OMP_THREADS, local_environment
from echelon.launch.local import fork_server
from echelon.launch.local.messages import Channel, channel_pair

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = (
    *fork_server.PRELOADED,
    "echelon.training.loop",
    "echelon.training.whole_run",
    "echelon.proof.ranks",
    "echelon.training.subject",
)
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """Ask for a fork server; its socket and the standard outputs come along as descriptors."""

    environment: dict[str, str]
    folder: str


@dataclass(frozen=True, slots=True)
class ServerStarted:
    """Tell of the fork server that was forked."""

    pid: int


class ForkedServer:
    """Stand for a fork server that is no child of this process, as `subprocess.Popen` would."""

    def __init__(self, pid: int) -> None:
        """Hold the process `pid`, which has not ended yet."""
        self._descriptor: int | None = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return 0 once the process has ended; what it said at its end is not known here."""
        if self._descriptor is None:
            return 0
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended, and forget it."""
        if self._descriptor is not None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fork server", timeout)
            os.close(self._descriptor)
            self._descriptor = None
        return 0

    def kill(self) -> None:
        """End the process at once."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class ForkTemplate:
    """Own the process that fork servers are forked from; it starts with the first of them."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._control: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process now: processes that are forked later share it."""
        if self._control is None:
            self._start()

    def start_fork_server(
        self, descriptor: int, environment: Mapping[str, str], _preloaded: Sequence[str]
    ) -> ForkedServer:
        """Do what `echelon.launch.local.rank_processes.start_fork_server` does, by a fork."""
        control = self._control or self._start()
        sys.stdout.flush()
        sys.stderr.flush()
        request = ServerRequest({**os.environ, **environment}, str(Path.cwd()))
        control.send_with_descriptors(request, [descriptor, 1, 2])
        messages: list[object] = []
        while not messages:
            messages = control.receive(_START_TIMEOUT_S)
        (started,) = messages
        assert isinstance(started, ServerStarted)
        return ForkedServer(started.pid)

    def close(self) -> None:
        """End the process."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()

    def _start(self) -> Channel:
        self._control, theirs = channel_pair(send_timeout_s=_START_TIMEOUT_S)
        self._process = subprocess.Popen(
            # Not by -m: messages are of the classes of this module, not of __main__.
            [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **local_environment(world_size=8)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        return self._control


def main(control_descriptor: int) -> None:
    """Fork fork servers for the tests at the other end of `control_descriptor` until they go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _reap)
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    control = Channel(socket.socket(fileno=control_descriptor))
    with contextlib.suppress(EOFError, OSError):
        while True:
            request, descriptors = control.receive_with_descriptors(3)
            assert isinstance(request, ServerRequest)
            pid = os.fork()
            if not pid:
                _become_fork_server(control, request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(ServerStarted(pid))


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_fork_server(control: Channel, request: ServerRequest, descriptors: list[int]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        for standard, descriptor in zip((1, 2), descriptors[1:], strict=True):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        import torch

        # It read this variable when it was imported.
        num_threads = int(request.environment[OMP_THREADS])
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        code = fork_server.main(descriptors[0])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
