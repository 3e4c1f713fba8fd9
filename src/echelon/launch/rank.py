"""The life of a local rank: take a job, join, call the target, report, wait for the others."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.core.errors import EchelonError
from echelon.launch.channel import Channel
from echelon.launch.context import Progress, RankContext
from echelon.launch.heart import Heart, end_process
from echelon.launch.messages import Job, Joined, Raised, Returned, Seat
from echelon.launch.process_group import device_of, process_group
from echelon.launch.target import find_target

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
    """Run jobs until the supervisor closes the channel; never returns normally.

    `store_descriptor` is the listening socket of the store, which the first rank hosts.
    """
    progress = Progress()
    faulthandler.enable(sys.__stderr__)
    faulthandler.register(DUMP_SIGNAL, sys.__stderr__)
    for ask in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ask, lambda *_: progress.request_stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heart = Heart(channel, progress)
    heart.start()
    hosted = _host_store(store_descriptor) if store_descriptor is not None else None
    while True:
        job = heart.inbox.get()
        assert isinstance(job, Job), f"expected a job, not {job!r}"
        _work(job, seat, channel, heart, progress, hosted)


def describe_error(error: BaseException) -> Raised:
    """Return `error` as a message: `connection` says that another rank may be its cause."""
    text = "".join(traceback.format_exception(error))
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
    hosted: dist.TCPStore | None,
) -> None:
    progress.reset()
    _same_start()
    try:
        target = find_target(job.target)
        store = hosted or _join_store(job)
        store = dist.PrefixStore(f"job{job.number}", store)
        store.set_timeout(timedelta(seconds=job.join_timeout_s))
        device = device_of(job.backend, seat.rank)
        group = process_group(
            job.backend,
            dist.PrefixStore("group", store),
            rank=seat.rank,
            world_size=job.world_size,
            timeout_s=job.collective_timeout_s,
        )
        with group:
            channel.send(Joined())
            context = RankContext(
                rank=seat.rank,
                world_size=job.world_size,
                local_rank=seat.rank,
                device=device,
                store=dist.PrefixStore("target", store),
                progress=progress,
                label=job.label,
            )
            channel.send(Returned(target(context, job.argument)))
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


def _same_start() -> None:
    """Undo what an earlier job may have set for the whole process."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)


def _host_store(descriptor: int) -> dist.TCPStore:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def _join_store(job: Job) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1",
        job.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=job.join_timeout_s),
    )
