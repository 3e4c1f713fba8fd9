# SPDX-License-Identifier: Apache-2.0
"""The process that imports torch once and forks every local rank from there.

Importing torch takes seconds of CPU in each interpreter; a fork takes milliseconds and shares the
memory. That is safe while this process has one thread and has touched no GPU, so it does nothing
else: it forks the ranks that the supervisor asks for, reports which children ended, and ends with
the supervisor. It ignores requests to stop, which the supervisor obeys; they are held back until
its first line.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from echelon.launch.local.messages import (
    Channel,
    ForkServerReady,
    ProcessExited,
    RankSlot,
    RankStarted,
)
from echelon.launch.local.output import redirect_to_log
from echelon.launch.stop import ignore_requests

PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "echelon.launch.local.rank")
"""torch._dynamo is what the first optimizer of a process imports, for as long as torch itself."""

_PR_SET_PDEATHSIG = 1  # option of prctl(2)
_PR_SET_NAME = 15  # option of prctl(2)


def main(control_descriptor: int, modules: Sequence[str] = ()) -> int:
    """Fork ranks for the supervisor at the other end of `control_descriptor` until it goes.

    The ranks find `modules` imported, beside what all ranks need.
    """
    ignore_requests()
    control = Channel(socket.socket(fileno=control_descriptor))
    problem = ""
    with _killed_with_the_other_end(control):
        try:
            for module in (*PRELOADED, *modules):
                importlib.import_module(module)
        except ImportError as error:
            problem = f"cannot import {error.name}: {error}"
        gc.collect()
        gc.freeze()
    try:
        control.send(ForkServerReady(problem))
    except OSError:
        return 0
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    children: set[int] = set()
    try:
        while True:
            ready, _, _ = select.select([control, woken], [], [])
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                _tell_ended(children, control)
            if control in ready:
                slot, descriptors = control.receive_with_descriptors(2)
                assert isinstance(slot, RankSlot)
                pid = _fork(slot, descriptors, [control.fileno(), woken, wake])
                children.add(pid)
                control.send(RankStarted(slot.rank, pid))
    except (EOFError, OSError):
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return 0


@contextmanager
def _killed_with_the_other_end(control: Channel) -> Iterator[None]:
    """Have the kernel end this process when the supervisor ends: imports cannot wait for that.

    The supervisor sends nothing meanwhile, so any event of the socket is its end.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_DFL)
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([control], [], [], 0)[0]:
        os._exit(0)
    try:
        yield
    finally:
        fcntl.fcntl(control, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, before)


def _tell_ended(children: set[int], control: Channel) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            control.send(ProcessExited(pid, os.waitstatus_to_exitcode(status)))


def _fork(slot: RankSlot, descriptors: list[int], ours: list[int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        _become_rank(slot, descriptors, ours, parent)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_rank(slot: RankSlot, descriptors: list[int], ours: list[int], parent: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in ours:
        os.close(descriptor)
    _become_child(parent, process_name(slot.rank))
    redirect_to_log(Path(slot.log_path), shown=slot.shown)
    os.environ.update(slot.environment)
    sys.path[:] = slot.path
    from echelon.launch.local.rank import run_rank

    channel = Channel(socket.socket(fileno=descriptors[0]))
    run_rank(channel, slot, descriptors[1] if len(descriptors) > 1 else None)


def process_name(rank: int) -> str:
    """Return the name under which `ps` and `top` list the process of a rank."""
    return f"rank-{rank:04d}"


def _become_child(parent: int, name: str) -> None:
    """Take a name, and have the kernel kill this process when its parent dies, however it does."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_NAME, name.encode())
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
