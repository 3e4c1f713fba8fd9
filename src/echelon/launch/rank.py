"""The life of a local rank: take a job, join, call the target, report, wait for the others."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from echelon.core.errors import EchelonError
from echelon.launch.channel import Channel
from echelon.launch.context import Progress, RankContext
from echelon.launch.environment import MASTER_PORT
from echelon.launch.handshake import introduce
from echelon.launch.heart import Heart, end_process
from echelon.launch.host_memory import keep_freed_memory
from echelon.launch.messages import Job, Joined, Raised, Returned, Seat
from echelon.launch.process_group import device_of, process_group
from echelon.launch.store import PrefixStore, Store, host_store, join_store
from echelon.launch.target import TargetFunction, find_target

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a rank write all its stacks to its log, even when its interpreter is held."""

_VERDICT_S = 60.0
_CONNECTION_WORDS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timed out after",
    "wait timeout",
    "socket timeout",
    "read error",
    "write error",
    "connectfullmesh failed",
    "ncclremoteerror",
    "remote process exited",
    "communicator was aborted",
    "watchdog caught collective",
    "application timeout caused pair closure",
    "failed to recv",
    "sendbytes failed",
)


def serve(channel: Channel, seat: Seat, store_descriptor: int | None) -> None:
    """Run jobs until the supervisor sends `Leave`; a lost supervisor ends the process.

    `store_descriptor` is the listening socket of the store, which the first rank hosts.
    """
    keep_freed_memory()
    progress = Progress()
    log_descriptor = 2
    faulthandler.enable(log_descriptor)
    faulthandler.register(DUMP_SIGNAL, log_descriptor)
    # Ctrl-C and a closed terminal reach the supervisor too, which passes the request on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: progress.request_stop())
    heart = Heart(channel, progress)
    heart.start()
    hosted: Store | None = None
    if store_descriptor is not None:
        hosted = host_store(int(seat.environment[MASTER_PORT]), store_descriptor)
    while isinstance(job := heart.inbox.get(), Job):
        _work(job, seat, channel, heart, progress, hosted)


def describe_error(error: BaseException) -> Raised:
    """Return `error` as a message: `connection` says that another rank may be its cause."""
    text = "".join(traceback.format_exception(_without_caller(error)))
    summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    return Raised(
        at=time.monotonic(),
        summary=summary,
        traceback=text,
        connection=is_connection_error(error),
        error=error if isinstance(error, EchelonError) else None,
    )


def is_connection_error(error: BaseException) -> bool:
    """Return whether `error` says that another rank is gone or late, and nothing more."""
    if isinstance(error, ConnectionError | dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CONNECTION_WORDS)


def _work(
    job: Job,
    seat: Seat,
    channel: Channel,
    heart: Heart,
    progress: Progress,
    hosted: Store | None,
) -> None:
    progress.reset()
    _same_start()
    try:
        target = find_target(job.target)
        timeout_s = job.join_timeout_s
        store = PrefixStore(f"job{job.number}", hosted or join_store(job.port, timeout_s))
        store.set_timeout(timedelta(seconds=timeout_s))
        progress.enter("the joining of all ranks")
        if job.introduce:
            introduce(
                store,
                rank=seat.rank,
                labels=job.labels,
                argument=job.argument,
                timeout_s=timeout_s,
            )
        device = device_of(job.backend, seat.rank)
        group = process_group(
            job.backend,
            PrefixStore("group", store),
            rank=seat.rank,
            world_size=job.world_size,
            timeout_s=job.collective_timeout_s,
        )
        with group:
            progress.leave()
            channel.send(Joined())
            context = RankContext(
                rank=seat.rank,
                world_size=job.world_size,
                local_rank=seat.rank,
                device=device,
                store=PrefixStore("target", store),
                progress=progress,
                label=job.labels[seat.rank],
            )
            channel.send(Returned(call_target(target, context, job.argument)))
            progress.enter("the end of the other ranks")
            heart.inbox.get()
    except BaseException as error:
        report = describe_error(error)
        print(report.traceback, file=sys.__stderr__, flush=True)
        with contextlib.suppress(OSError):
            channel.send(report)
        # The verdict arrives as End, which the heart obeys: until then our sockets stay open, so
        # that the others see one cause and not its echo.
        threading.Event().wait(_VERDICT_S)
        end_process(f"its own error: {report.summary}")
    gc.collect()


def call_target(target: TargetFunction, context: RankContext, argument: object) -> Any:
    """Call the target; stacks and tracebacks are shown from here on."""
    return target(context, argument)


def _without_caller(error: BaseException) -> BaseException:
    """Return `error` with a traceback that starts in the target, where it came that far."""
    here = error.__traceback__
    while here is not None:
        if here.tb_frame.f_code is call_target.__code__:
            return error.with_traceback(here.tb_next or here)
        here = here.tb_next
    return error


def _same_start() -> None:
    """Undo what an earlier job may have set for the whole process."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
