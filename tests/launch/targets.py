"""What ranks run in these tests."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.core.errors import DataError
from echelon.core.rules import Rule
from echelon.launch.context import RankContext
from echelon.launch.handshake import check_same_state

BROKEN_FILE = Rule(id="broken-file", why="for tests", bad="", fixed="")


def add_ranks(context: RankContext, factor: float) -> dict[str, Any]:
    """Sum the ranks of the world, times `factor`."""
    total = torch.tensor(float(context.rank) * factor)
    dist.all_reduce(total)
    return {"rank": context.rank, "world": dist.get_world_size(), "total": total.item()}


def train(context: RankContext, argument: dict[str, Any]) -> dict[str, Any]:
    """Step in lockstep as training does; rank `rank` fails in the way `how` before step `step`."""
    pids = argument.get("pids")
    if pids:
        Path(pids, str(context.rank)).write_text(str(os.getpid()))
    if argument.get("answers", True):
        context.progress.answer_stop()
    for step in range(argument.get("steps", 10_000)):
        context.progress.mark(f"step {step}")
        if context.rank == argument.get("rank") and step == argument.get("step", 3):
            fail(argument["how"])
        time.sleep(argument.get("pause", 0.01))
        stop = torch.tensor(float(context.stop_requested()))
        with context.progress.waits_for("all_reduce dp"):
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            return {"stopped": step}
    return {"done": True}


def fail(how: str) -> None:
    """Fail in the way `how`."""
    match how:
        case "raise":
            raise ValueError("the loss of my life")
        case "user-error":
            raise DataError(BROKEN_FILE.problem("shard 3 is 12 bytes short"))
        case "raise-with-a-full-log":
            full = os.open("/dev/full", os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(full, stream)
            raise ValueError("the loss of my life")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(7)
        case "sys-exit":
            sys.exit(0)
        case "hold-interpreter":
            ctypes.PyDLL(None).sleep(1000)
        case "hang":
            time.sleep(1000)
        case _:
            raise AssertionError(how)


def raise_in_flight(context: RankContext, argument: Any) -> None:
    """Raise on the last rank while it is in a collective for which the others do not come."""
    if context.rank == context.world_size - 1:
        dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("the loss of my life")
    for step in range(200):
        context.progress.mark(f"step {step}")
        time.sleep(0.1)


def slow(context: RankContext, seconds: float) -> int:
    """Keep one rank busy while the others wait for it in a collective."""
    if context.rank == context.world_size - 1:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
    dist.barrier()
    return context.rank


def wait_in_a_circle(context: RankContext, argument: Any) -> None:
    """Have every rank wait for the next one."""
    dist.recv(torch.zeros(1), src=(context.rank + 1) % context.world_size)


def wait_in_turn(context: RankContext, argument: Any) -> None:
    """Have every rank wait for the next one: rank 0 late in the order of the work, rank 1 early."""
    context.progress.mark("step 1")
    context.progress.enter(f"a message at F{context.rank}.0", turn=10 - context.rank)
    dist.recv(torch.zeros(1), src=(context.rank + 1) % context.world_size)


def leave_early(context: RankContext, seconds: float) -> int:
    """Return at once on rank 0 while the others still talk."""
    group = dist.new_group(list(range(1, context.world_size)))
    if context.rank > 0:
        time.sleep(seconds)
        dist.all_reduce(torch.ones(3), group=group)
    return context.rank


def unpicklable(context: RankContext, argument: Any) -> Any:
    """Return a value that cannot be pickled."""
    return lambda: None


def state_digests(context: RankContext, odd: int) -> str:
    """Compare digests where rank `odd` holds another value."""
    digests = {"wte": "other" if context.rank == odd else "same"}
    if context.rank % 2:
        digests["head of odd ranks"] = "equal"
    labels = tuple(f"tp{rank}" for rank in range(context.world_size))
    check_same_state(context, digests, labels)
    return "agreed"


def environment(context: RankContext, name: str) -> str | None:
    """Return one environment variable of the rank."""
    return os.environ.get(name)


def talk(context: RankContext, argument: Any) -> None:
    """Print on both streams."""
    print(f"out {context.rank}")
    print(f"err {context.rank}", file=sys.stderr)


def process_id(context: RankContext, argument: Any) -> int:
    """Return the id of this process; it may be the only one of its job that lives."""
    return os.getpid()


def change_defaults(context: RankContext, argument: Any) -> tuple[str, bool, float]:
    """Return what torch does by default, then change it for the process."""
    found = (str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.rand(1).item())
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return found


def impatient(context: RankContext, argument: Any) -> None:
    """Hang on the last rank while the others wait in a collective that gives up soon."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if context.rank == context.world_size - 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1), group=group)


def come_and_go(context: RankContext, argument: dict[str, Any]) -> dict[str, Any]:
    """Live without other ranks, once all have begun; rank `rank` fails at its first `times` starts.

    It does so in the way `how`, and at later starts as `then` says. Others wait for it with
    `until`, and until they have heard of so many `losses`.
    """
    store, attempt = context.store, context.attempt
    fails = context.rank == argument.get("rank")
    # The process group is one island: all ranks meet in the store.
    store.set(f"begun{context.rank}", "")
    store.wait([f"begun{rank}" for rank in range(argument["ranks"])], timedelta(seconds=60))
    if fails and attempt < argument.get("times", 1):
        fail(argument.get("then", "kill") if attempt else argument["how"])
    if fails:
        store.set("came", str(attempt))
    elif argument.get("until"):
        store.wait(["came"], timedelta(seconds=60))
    deadline = time.monotonic() + 60
    while not fails and len(context.progress.lost) < argument.get("losses", 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    told = [[one.rank, one.attempt, one.cause, one.returns] for one in context.progress.lost]
    return {"attempt": attempt, "group": dist.get_world_size(), "lost": told}


def compile_for_long(context: RankContext, argument: float) -> int:
    """Be in PyTorch's compiler for so many seconds, on one rank; the other waits for it."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    from echelon.parallel.kernels.compile_marks import CompileMarks

    marks = CompileMarks(context.progress.mark)
    if context.rank == 0:
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            time.sleep(argument)
    marks.close()
    return context.rank
