# SPDX-License-Identifier: Apache-2.0
"""The life of a local rank: take a job, join, call the target, report, wait for the others.

Its heartbeat is a thread that talks to the supervisor while the main thread works. It sends beats
during a job, takes requests, and ends the process when told to or when the supervisor is gone. A
stopped process stops beating; a stuck main thread does not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from echelon.core.choices.registry import use_plugins
from echelon.core.errors import EchelonError
from echelon.launch.context import LostRank, RankContext, RankProgress
from echelon.launch.desync.connections import own_connections
from echelon.launch.desync.ring import FingerprintRing, ring_path
from echelon.launch.environment import MASTER_PORT
from echelon.launch.handshake import check_same_start
from echelon.launch.host import keep_freed_memory
from echelon.launch.local.messages import (
    Channel,
    ExitRequest,
    Heartbeat,
    JobResult,
    Notice,
    RankJob,
    RankSlot,
    TargetFunction,
    find_target,
    group_place,
)
from echelon.launch.local.output import say_if_possible
from echelon.launch.local.stacks import stacks_of_process
from echelon.launch.process_group import (
    PrefixStore,
    Store,
    device_of,
    host_store,
    join_store,
    joined_ranks,
)
from echelon.launch.root_cause import FaultKind, RankFault

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

HEARTBEAT_INTERVAL_S = 0.5
EXIT_ENDED = 1  # exit code


def run_rank(channel: Channel, slot: RankSlot, store_descriptor: int | None) -> None:
    """Run jobs until the supervisor has no more; a lost supervisor ends the process.

    `store_descriptor` is the listening socket of the store, which the first rank hosts.
    """
    keep_freed_memory()
    progress = RankProgress()
    faulthandler.enable(2)  # the log
    faulthandler.register(DUMP_SIGNAL, 2)
    progress.announce = lambda: channel.send(Notice.ANSWERS_STOP)
    # Ctrl-C and a closed terminal reach the supervisor too, which passes the request on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: progress.request_stop())
    heartbeat = HeartbeatThread(channel, progress)
    heartbeat.start()
    hosted: Store | None = None
    if store_descriptor is not None:
        hosted = host_store(int(slot.environment[MASTER_PORT]), store_descriptor)
    while isinstance(job := heartbeat.inbox.get(), RankJob):
        _work(job, slot, channel, heartbeat, progress, hosted)


def fault_from_error(error: BaseException, rank: int) -> RankFault:
    """Return `error` as a fault of `rank`; another may be the cause of a lost connection.

    So may it be where our own error only says where the connection was lost.
    """
    text = "".join(traceback.format_exception(_without_caller(error)))
    summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    cause = error.__cause__ if isinstance(error, EchelonError) else None
    lost = is_connection_error(error) or (cause is not None and is_connection_error(cause))
    return RankFault(
        rank=rank,
        kind=FaultKind.CONNECTION if lost else FaultKind.RAISED,
        at=time.monotonic(),
        summary=summary,
        detail=text,
        error=error if isinstance(error, EchelonError) else None,
    )


def is_connection_error(error: BaseException) -> bool:
    """Return whether `error` says that another rank is gone or late, and nothing more."""
    if isinstance(error, ConnectionError | dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CONNECTION_WORDS)


def _work(
    job: RankJob,
    slot: RankSlot,
    channel: Channel,
    heartbeat: HeartbeatThread,
    progress: RankProgress,
    hosted: Store | None,
) -> None:
    progress.reset()
    progress.attempt = job.attempt
    # An earlier job may have set these for the whole process.
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    try:
        use_plugins(job.plugins)
        target = find_target(job.target)
        timeout_s = job.limits.rendezvous_s
        store = PrefixStore(f"job{job.number}", hosted or join_store(job.port, timeout_s))
        store.set_timeout(timedelta(seconds=timeout_s))
        progress.enter("the joining of all ranks")
        if job.rings:
            # Without room for a ring the run goes on: it only cannot be compared.
            with contextlib.suppress(OSError):
                progress.ring = FingerprintRing(ring_path(Path(job.rings), job.number, slot.rank))
        if job.introduce and not job.attempt:
            check_same_start(
                store, rank=slot.rank, labels=job.labels, argument=job.argument, timeout_s=timeout_s
            )
        device = device_of(job.backend, slot.rank)
        group = joined_ranks(
            store,
            device,
            rank=slot.rank,
            labels=job.labels,
            progress=progress,
            timeout_s=job.limits.collective_s,
            place=group_place(job.elastic, slot.rank, job.world_size, job.attempt),
        )
        with group as context:
            try:
                progress.leave()
                channel.send(Notice.GROUP_JOINED)
                channel.send(JobResult(call_target(target, context, job.argument)))
                progress.enter("the end of the other ranks")
                heartbeat.inbox.get()
            except BaseException as error:
                # To leave the group first could wait for collectives whose peers never come.
                _report_and_end(error, slot.rank, channel)
    except BaseException as error:
        _report_and_end(error, slot.rank, channel)
    gc.collect()


def _report_and_end(error: BaseException, rank: int, channel: Channel) -> NoReturn:
    """Tell the supervisor what this rank raised, write it to the log if it can be, and end.

    The verdict arrives as an ExitRequest, which the heartbeat obeys: until then our sockets stay
    open, so that the others see one cause and not its echo. The process ends with its communicators
    as they are: neither a collective in flight nor a full disk keeps it.
    """
    report = fault_from_error(error, rank)
    with contextlib.suppress(OSError):
        channel.send(report)
    say_if_possible(report.detail, sys.__stderr__)
    threading.Event().wait(_VERDICT_S)
    end_process(f"its own error: {report.summary}")


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


class HeartbeatThread(threading.Thread):
    """Beat for one rank; `inbox` gets what is for the main thread."""

    def __init__(self, channel: Channel, progress: RankProgress) -> None:
        """Prepare the thread; `start` starts it."""
        super().__init__(name="heartbeat", daemon=True)
        self.inbox: queue.SimpleQueue[RankJob | Notice] = queue.SimpleQueue()
        self._channel = channel
        self._progress = progress
        self._main = threading.main_thread()
        self._working = False

    def run(self) -> None:
        """Beat and listen until the supervisor is gone."""
        try:
            while True:
                for message in self._channel.receive(HEARTBEAT_INTERVAL_S):
                    self._take(message)
                if self._working:
                    now = self._progress
                    beat = Heartbeat(count=now.count, doing=now.doing, waiting=now.waiting)
                    self._channel.send_if_room(beat)
        except (EOFError, OSError):
            end_process("the supervisor is gone")

    def _take(self, message: object) -> None:
        match message:
            case RankJob():
                self._working = True
                self._progress.clear_stop()
                self._progress.lost = list(message.lost)
                self.inbox.put(message)
            case Notice.LEAVE_GROUP | Notice.NO_MORE_JOBS:
                self._working = False
                self.inbox.put(message)
            case LostRank():
                self._progress.lost.append(message)
            case Notice.STOP:
                self._progress.request_stop()
            case Notice.TELL_STACKS:
                stacks = stacks_of_process(self._main)
                now = self._progress
                told = replace(
                    stacks,
                    waiting=now.waiting or stacks.waiting,
                    turn=now.turn,
                    unfinished=now.unfinished,
                    connections=own_connections(),
                )
                self._channel.send(told)
            case ExitRequest(reason=reason):
                end_process(reason)
            case _:
                raise AssertionError(f"no rank knows the message {message!r}")


def end_process(reason: str) -> NoReturn:
    """Write `reason` to the log and leave without waiting for anything."""
    say_if_possible(f"{time.strftime('%H:%M:%S')} ends: {reason}", sys.__stderr__)
    os._exit(EXIT_ENDED)
