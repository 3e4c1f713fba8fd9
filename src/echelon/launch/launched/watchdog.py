# SPDX-License-Identifier: Apache-2.0
"""The thread that watches a rank under torchrun, where no supervisor of ours sees the processes.

Each rank beats into the store and watches the next rank: four small messages per rank and second,
however many ranks there are. The first fault that anyone writes there ends all ranks. Where one has
waited for long, all tell there what they have called (`exchange.py`).

Limits: a stopped or killed process is recognised as such by a rank on the same host; across hosts
only its silence is seen, after `silent_s`, so one native call that holds the interpreter for
longer looks the same. When the launcher's store is lost, every rank ends without a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace

import psutil

from echelon.core.errors import RunFailed
from echelon.launch.context import RankProgress
from echelon.launch.desync.connections import own_connections
from echelon.launch.desync.findings import Finding, at_length
from echelon.launch.desync.fingerprint import Activity
from echelon.launch.launched.exchange import DesyncExchange, RankAlone
from echelon.launch.local.desync_watch import KnownRank, fault_of, note_of
from echelon.launch.local.messages import Limits
from echelon.launch.local.output import say_if_possible
from echelon.launch.local.stacks import stacks_of_process
from echelon.launch.process_group import Store
from echelon.launch.root_cause import (
    CANNOT_END,
    FaultKind,
    RankFailure,
    RankFault,
    SignsOfLife,
    rank_name,
)

WATCHDOG_INTERVAL_S = 1.0
SILENT_S = 12.0
_CYCLE_TICKS = 3  # ticks
_SHORTEST_S = 0.05
_LEAVES_WITHIN_S = 5.0  # of a watchdog that may wait for a store that is gone
_FAULT = "fault"
_FAULT_ENTRIES = ("rank", "kind", "at", "summary", "detail")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeartbeat:
    """State where a rank runs; `count` grows while it is alive.

    `waits` says that it has waited for others for longer than a step may take, at its `turn` in an
    order in which all ranks' work can be done, if there is one.
    """

    count: int
    host: str
    pid: int
    done: bool
    waits: bool
    turn: int | None


class Watchdog(threading.Thread):
    """Watch this rank and the next one; end this process when any rank has failed."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        labels: tuple[str, ...],
        progress: RankProgress,
        limits: Limits,
        store_port: int = 0,
    ) -> None:
        """Prepare the thread; `store` must be a connection of its own, to `store_port`."""
        super().__init__(name="watchdog", daemon=True)
        now = time.monotonic()
        self._store = store
        self._rank = rank
        self._labels = labels
        self._who = rank_name(rank, labels[rank])
        self._progress = progress
        self._limits = limits
        self._main = threading.main_thread()
        self._host = socket.gethostname()
        self._next = (rank + 1) % len(labels)
        self._next_count, self._next_signs = -1, SignsOfLife(heard_at=now)
        self._own_count, self._own_moved_at = -1, now
        self._ticks = self._circle_ticks = 0
        self._done = False
        self._left = threading.Event()
        self._ticked_at = now
        self._told: set[str] = set()
        self._store_port = store_port
        self._exchange: DesyncExchange | None = None
        self._alone: RankAlone | None = None
        if progress.ring is not None and limits.desync_s is not None:
            self._alone = RankAlone(
                progress.ring.path,
                rank=rank,
                label=labels[rank],
                limits=limits,
                ticked_at=lambda: self._ticked_at,
                end=self._exit,
            )
            self._exchange = DesyncExchange(
                store, progress.ring, rank=rank, host=self._host, after_s=limits.desync_s
            )

    def run(self) -> None:
        """Beat and watch until this rank is done and left, or another one failed."""
        if self._alone is not None:
            self._alone.start()
        try:
            while not self._left.is_set():
                self._tick()
                self._left.wait(self._pause_s())
        except RuntimeError as error:
            if not self._done:
                self._exit(f"{self._who} ends: the run's store is gone ({error})")

    def finish(self) -> None:
        """Say that this rank needs no watching any more."""
        self._done = True

    def leave(self) -> None:
        """End the thread before the process ends.

        A thread that is in the store when Python ends is torn out of it, which aborts the process.
        """
        self._left.set()
        if self.is_alive():
            self.join(timeout=_LEAVES_WITHIN_S)

    def publish_fault(self, fault: RankFault) -> RankFault:
        """Write `fault` for all ranks to see, unless there is one; return the one that counts."""
        text = json.dumps({name: getattr(fault, name) for name in _FAULT_ENTRIES})
        first = _fault_from_json(self._store.compare_set(_FAULT, "", text))
        return fault if (first.rank, first.at) == (fault.rank, fault.at) else first

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at > 3 * WATCHDOG_INTERVAL_S:
            # This process was stopped itself, perhaps with the others: start all clocks anew.
            self._next_signs, self._own_moved_at = SignsOfLife(heard_at=now), now
        self._ticked_at = now
        self._ticks += 1
        beat = StoreHeartbeat(
            count=self._ticks,
            host=self._host,
            pid=os.getpid(),
            done=self._done,
            waits=self._progress.count == self._own_count and self._waits_too_long(now),
            turn=self._progress.turn,
        )
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))
        if self._store.check([_FAULT]):
            self._end_for(_fault_from_json(self._store.get(_FAULT)))
        self._compare_calls(now)
        if not self._done:
            self._watch_next(now)
            self._watch_self(now)

    def _pause_s(self) -> float:
        """Return how long to sleep: no longer than until a wait of this rank is too long."""
        due = None if self._exchange is None else self._exchange.due_s(time.monotonic())
        pause = WATCHDOG_INTERVAL_S
        return pause if due is None or self._done else min(pause, max(_SHORTEST_S, due))

    def _compare_calls(self, now: float) -> None:
        """Tell what this rank has called if asked; ask where it waits for too long."""
        if self._exchange is None:
            return
        self._exchange.answer(self._known)
        due = self._exchange.due_s(now)
        if self._done or due is None or due > 0:
            return
        verdict, evidence = self._exchange.compare(self._labels, self._known)
        self._ticked_at = time.monotonic()  # it was no sleep of this process
        if verdict is None or self._store.check([_FAULT]):
            return
        fault = fault_of(verdict, evidence)
        cut = verdict.finding is Finding.LINK and self._waits_too_long(now)
        if verdict.certain or cut:
            self._report(self.publish_fault(fault))
        elif fault.summary not in self._told:
            self._told.add(fault.summary)
            label = self._labels[fault.rank]
            say_if_possible(note_of(fault, label, self._limits.step_s), sys.stderr)

    def _known(self) -> KnownRank:
        """Return what this rank knows of itself, beside its ring."""
        stacks = stacks_of_process(self._main)
        stacks = replace(
            stacks,
            unfinished=self._progress.unfinished,
            connections=own_connections(without={self._store_port}),
        )
        return KnownRank(
            rank=self._rank,
            label=self._labels[self._rank],
            activity=Activity.RETURNED if self._done else None,
            doing=self._progress.doing,
            waiting=self._progress.waiting,
            stacks=stacks,
        )

    def _explained(self, fault: RankFault) -> RankFault:
        """Return what explains that a process is gone, or cannot be heard; or the fault as it is.

        Calls that do not meet may have ended it, or its link be cut.
        """
        ended = {FaultKind.KILLED: Activity.GONE, FaultKind.SILENT: Activity.UNKNOWN}
        if self._exchange is None or fault.kind not in ended:
            return fault

        def gone(rank: int) -> Activity | None:
            return ended[fault.kind] if rank == fault.rank else None

        verdict, evidence = self._exchange.compare(self._labels, self._known, gone)
        if verdict is None:
            return fault
        found = fault_of(verdict, evidence)
        if verdict.finding is Finding.GONE:
            return replace(fault, detail=found.detail)
        return found if verdict.certain or verdict.links else fault

    def _watch_next(self, now: float) -> None:
        if self._next == self._rank:
            return
        beat = self._read_heartbeat(self._next)
        if beat is None or beat.done:
            return
        if beat.count != self._next_count:
            self._next_count, self._next_signs.heard_at = beat.count, now
        state = _process_state(beat.pid) if beat.host == self._host else None
        if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            wrong = (FaultKind.KILLED, "is gone: it was killed, or exited without a word")
        else:
            wrong = self._next_signs.missed(
                now,
                stopped=state == psutil.STATUS_STOPPED,
                stopped_s=self._limits.stopped_s,
                silent_s=SILENT_S if state is None else self._limits.silent_s,
            )
        if wrong is not None and not self._done:
            fault = RankFault(rank=self._next, kind=wrong[0], at=now, summary=wrong[1])
            self._report(self.publish_fault(self._explained(fault)))

    def _watch_self(self, now: float) -> None:
        if self._progress.count != self._own_count:
            self._own_count, self._own_moved_at = self._progress.count, now
            self._circle_ticks = 0
        quiet_s = now - self._own_moved_at
        if self._waits_too_long(now):
            self._watch_cycle(quiet_s)
        if quiet_s <= self._limits.step_s or self._progress.waiting:
            return
        stacks = stacks_of_process(self._main)
        if not stacks.waiting:
            self._report_stuck(quiet_s, "", stacks.text)

    def _waits_too_long(self, now: float) -> bool:
        return bool(self._progress.waiting) and now - self._own_moved_at > self._limits.step_s

    def _watch_cycle(self, quiet_s: float) -> None:
        """Find out whether all ranks wait, and whether this one waits for what was never sent.

        Without an order of the work nobody is to blame more than another: torch's timeout tells.
        """
        mine = self._progress.turn
        beats = [self._read_heartbeat(rank) for rank in range(len(self._labels))]
        if mine is None or not all(beat and (beat.done or beat.waits) for beat in beats):
            return
        turns = [
            (beat.turn, rank)
            for rank, beat in enumerate(beats)
            if beat and not beat.done and beat.turn is not None
        ]
        if min(turns, default=None) != (mine, self._rank):
            return
        self._circle_ticks += 1
        if self._circle_ticks < _CYCLE_TICKS:
            return  # a beat may be a moment old, and its rank have moved
        why = f", and neither has any other rank: it waits in {self._progress.waiting}"
        self._report_stuck(quiet_s, why, stacks_of_process(self._main).text)

    def _report_stuck(self, quiet_s: float, why: str, stacks: str) -> None:
        what = f"has not moved for {quiet_s:.0f} s{why}, last heard of at {self._progress.doing}"
        at, kind = time.monotonic(), FaultKind.STUCK
        fault = RankFault(rank=self._rank, kind=kind, at=at, summary=what, detail=stacks)
        self._report(self.publish_fault(fault))

    def _end_for(self, fault: RankFault) -> None:
        """End for `fault`; a rank that raised it ends by its main thread, which has the story."""
        if fault.rank == self._rank and fault.kind in (FaultKind.RAISED, FaultKind.CONNECTION):
            return
        self._end_faulty_rank(fault)
        who = rank_name(fault.rank, self._labels[fault.rank])
        call = None if self._exchange is None else self._exchange.own_wait().waiting
        waited = "" if call is None else f"\n  it waited in {at_length(call)}"
        whom = "" if fault.rank == self._rank else f" for {who}"
        self._exit(f"{self._who} stops{whom}: {fault.summary}{waited}")

    def _report(self, fault: RankFault) -> None:
        """Print all that is known of `fault`, as the one rank that found it, and end."""
        self._end_faulty_rank(fault)
        self._exit(str(RankFailure(fault, self._labels[fault.rank])))

    def _end_faulty_rank(self, fault: RankFault) -> None:
        """Kill a process of this host that cannot end itself: its launcher would wait for it."""
        beat = self._read_heartbeat(fault.rank)
        if beat is None or fault.kind not in CANNOT_END:
            return
        if beat.host == self._host and beat.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.SIGKILL)

    def _read_heartbeat(self, rank: int) -> StoreHeartbeat | None:
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return None
        return StoreHeartbeat(**json.loads(self._store.get(key)))

    def _exit(self, message: str) -> None:
        if self._exchange is not None:
            self._exchange.close()
        say_if_possible(message, sys.stderr)
        os._exit(RunFailed.exit_code)


def _fault_from_json(text: str | bytes) -> RankFault:
    entries = json.loads(text)
    return RankFault(**{**entries, "kind": FaultKind(entries["kind"])})


def _process_state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
