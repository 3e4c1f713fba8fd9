"""The process that imports torch once and forks every local rank from there.

Importing torch takes seconds of CPU in each interpreter; a fork takes milliseconds and shares the
memory. That is safe while this process has one thread and has touched no GPU, so it does nothing
else: it forks what the supervisor asks for, tells which children ended, and ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
from pathlib import Path

from echelon.launch.channel import Channel
from echelon.launch.messages import Exited, NurseryReady, Seat, Spawned
from echelon.launch.output import redirect_to_log

PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "echelon.launch.rank")
"""torch._dynamo is what the first optimizer of a process imports, for as long as torch itself."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main(control_descriptor: int) -> int:
    """Fork ranks for the supervisor at the other end of `control_descriptor` until it goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    control = Channel(socket.socket(fileno=control_descriptor))
    problem = ""
    try:
        for module in PRELOADED:
            importlib.import_module(module)
    except ImportError as error:
        problem = f"cannot import {error.name}: {error}"
    gc.collect()
    gc.freeze()
    control.send(NurseryReady(problem))
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
                seat, descriptors = control.receive_with_descriptors(2)
                assert isinstance(seat, Seat)
                pid = _fork(seat, descriptors, [control.fileno(), woken, wake])
                children.add(pid)
                control.send(Spawned(seat.rank, pid))
    except (EOFError, OSError):
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return 0


def _tell_ended(children: set[int], control: Channel) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            control.send(Exited(pid, os.waitstatus_to_exitcode(status)))


def _fork(seat: Seat, descriptors: list[int], ours: list[int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        _become_rank(seat, descriptors, ours, parent)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_rank(seat: Seat, descriptors: list[int], ours: list[int], parent: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in ours:
        os.close(descriptor)
    _die_with(parent)
    _take_name(process_name(seat.rank))
    redirect_to_log(Path(seat.log_path), shown=seat.shown)
    os.environ.update(seat.environment)
    sys.path[:] = seat.path
    from echelon.launch.rank import serve

    channel = Channel(socket.socket(fileno=descriptors[0]))
    serve(channel, seat, descriptors[1] if len(descriptors) > 1 else None)


def process_name(rank: int) -> str:
    """Return the name under which `ps` and `top` list the process of a rank."""
    return f"rank-{rank:04d}"


def _take_name(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
