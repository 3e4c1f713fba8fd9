# SPDX-License-Identifier: Apache-2.0
"""What a rank writes down while it runs: one Event per collective, message and action.

A GPU runs what it was given later than the host gives it, so what the host's clock says of an
action is when it was launched. There an action is put between two marks, events in the queue of the
device: when it has passed one, its distance from the first mark is known. Marks cost microseconds
and wait for nothing; actions are written when the step has ended (`settle`). Collectives have the
host's times there: when they were launched and awaited; how long they were waited for is the time
in which the device's queue stood still for them, between two marks of their own.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from echelon.core.event import Event, EventSink
from echelon.launch.context import RankProgress, UnfinishedWait
from echelon.parallel.transport.fingerprints import (
    Finishing,
    IssuedOperation,
    Members,
    OperationFingerprints,
    UnfinishedOperations,
)
from echelon.parallel.transport.messages import PendingWorks


class Waiting(Protocol):
    """An operation under way that can be waited for."""

    def wait(self) -> object:
        """Return when it has ended."""
        ...


class CudaClock:
    """The clock of the stream that computes on one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Set the clock: the device must have nothing to do, so that both clocks meet."""
        self._device = device
        torch.cuda.synchronize(device)
        self.restart()

    def restart(self) -> None:
        """Set the clock anew; of marks from before, nothing must be asked any more.

        It is cheap where the stream has nothing to do: the host waits for its end. A distance is
        told in milliseconds as float32, 24 bits (`cudaEventElapsedTime`): after a day that is 8 ms
        and nothing finer, and the two clocks have drifted apart.
        """
        self._first = self.mark()
        self._first.synchronize()
        self._zero = time.perf_counter()

    def on_device(self) -> AbstractContextManager[None]:
        """Let a thread that has chosen no GPU ask for what this one has done."""
        return torch.cuda.device(self._device)

    def mark(self) -> torch.cuda.Event:
        """Put an event into the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def at(self, mark: torch.cuda.Event) -> float:
        """Return when the device came to a mark, on the host's `perf_counter`; waits for it."""
        mark.synchronize()
        return self._zero + self._first.elapsed_time(mark) / 1000.0


def clock_of(device: torch.device) -> CudaClock | None:
    """Return the clock of a device that runs behind the host; None where the host's is right."""
    return CudaClock(device) if device.type == "cuda" else None


@dataclass(slots=True)
class WaitTime:
    """Hold how long a rank had nothing to do but wait: seconds, or marks that tell them later."""

    seconds: float = 0.0
    begin: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None


@dataclass(slots=True)
class BegunCall:
    """Hold what is known of an event when it begins."""

    kind: str
    name: str
    start: float
    axis: str = ""
    num_bytes: int = 0
    microbatch: int | None = None
    far_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _MarkedEvent:
    """Hold an event of which the device knows when it was (`action`), or how long it `waited`."""

    event: Event
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None
    waited: WaitTime | None

    def settled(self, clock: CudaClock, zero: float) -> Event:
        """Return the event with its times, which are told from `zero` on; waits for its marks."""
        event, waited = self.event, self.waited
        if self.begin is not None and self.end is not None:
            event = replace(event, start=clock.at(self.begin) - zero, end=clock.at(self.end) - zero)
        if waited is not None and waited.begin is not None and waited.end is not None:
            event = replace(event, waited_s=clock.at(waited.end) - clock.at(waited.begin))
        return event


class Recorder:
    """Stamp events with this rank, its clock, and the stage and microbatch now at work."""

    def __init__(
        self,
        rank: int,
        sink: EventSink,
        waits: RankProgress | None = None,
        clock: CudaClock | None = None,
    ) -> None:
        """Send the events of `rank` to `sink` and its waits to `waits`; the clock starts now.

        `clock` tells when the device ran an action, where that is not when the host did.
        `far_bytes` are the bytes sent to ranks on other nodes, by axis, since they were cleared; a
        node is `devices_per_node` ranks in order (0: there is one node).
        """
        self.rank, self.run_rank, self.sink = rank, rank, sink
        self._clock = clock
        self._marked: list[_MarkedEvent] = []
        self._message: WaitTime | None = None
        self._waits = waits
        self._fingerprints: OperationFingerprints | None = None
        if waits is not None and waits.ring is not None:
            self._fingerprints = OperationFingerprints(waits.ring)
        self._unfinished: UnfinishedOperations | None = None
        if clock is not None and waits is not None:
            self._unfinished = UnfinishedOperations(clock.mark, clock.on_device)
        self.waited_s = 0.0
        self.devices_per_node = 0
        self.far_bytes = Counter[str]()
        self.stage: int | None = None
        self.microbatch: int | None = None
        self._task = ""
        self._turn: int | None = None
        self._zero = time.perf_counter()

    def within(self, first_rank: int) -> Recorder:
        """Return this recorder under the rank of a world that begins with `first_rank` of the run.

        Its groups are of ranks of that world, its events of the rank of the run.
        """
        other = copy.copy(self)
        other.rank = self.run_rank - first_rank
        return other

    def beside(self, sink: EventSink) -> Recorder:
        """Return a recorder of the same rank and clock for other threads: it marks no waits."""
        other = Recorder(self.rank, sink)
        other._zero = self._zero
        return other

    def now(self) -> float:
        """Return the seconds since this recorder was made."""
        return time.perf_counter() - self._zero

    def at(self, task: str, turn: int | None) -> None:
        """Say what this rank runs or is about to run, and its place in an order of all ranks' work.

        Where every rank waits, the one whose turn comes first waits for what was never sent.
        """
        self._task, self._turn = task, turn
        if self._fingerprints is not None:
            self._fingerprints.task = task

    @property
    def task(self) -> str:
        """Return what this rank runs or is about to run; "" between steps."""
        return self._task

    def mark(self, doing: str) -> None:
        """Tell who watches this rank that it has begun something new."""
        if self._waits is not None:
            self._waits.mark(doing)

    @contextmanager
    def waiting(self, collective: str, number: int = 0) -> Iterator[WaitTime]:
        """Mark what happens inside as a wait for other ranks; give how long it took.

        The rank that waits least in a step is the one that the others wait for. `number` is that of
        the operation's fingerprint. It has ended where nothing was raised and the host waits
        itself; what was raised leaves in the ring where it was raised.
        """
        wait, clock = WaitTime(), self._clock
        start, fingerprints = self.now(), self._fingerprints if number else None
        if clock is not None:
            wait.begin = clock.mark()
        if self._waits is not None:
            self._waits.enter(self._where(collective), self._turn)
        if fingerprints is not None:
            fingerprints.wait(number)
        try:
            yield wait
            if fingerprints is not None:
                fingerprints.go_on(number if self._unfinished is None else 0)
        finally:
            if self._waits is not None:
                self._waits.leave()
            if clock is not None:
                wait.end = clock.mark()
            wait.seconds = self.now() - start
            self.waited_s += wait.seconds

    def received(self, wait: WaitTime) -> None:
        """Note how long the message was waited for that the next action needs."""
        self._message = wait

    def begun(
        self,
        communicator: Members | None,
        axis: str,
        kind: str,
        name: str,
        tensor: torch.Tensor | None,
        ends: tuple[int, int] | None = None,
    ) -> int:
        """Leave the fingerprint of an operation that begins, and return its number; 0 of none.

        `tensor` is alike on all members; None where its size may differ. `ends` are those of a
        message.
        """
        found = self._fingerprints
        if found is None or communicator is None:
            return 0
        return found.issue(communicator, axis, kind, name, tensor, ends)

    def over(self, number: int) -> None:
        """Note that an operation that has no handle has ended."""
        if self._fingerprints is not None and number:
            self._fingerprints.go_on(number)

    def wait_for(self, work: Waiting, number: int) -> None:
        """Wait for an operation; of messages between pairs it is noted which one is waited for."""
        fingerprints = self._fingerprints if number else None
        if fingerprints is not None and isinstance(work, PendingWorks) and work.members:
            fingerprints.wait_each(number, work)
        else:
            work.wait()

    def issued(self, name: str, work: Finishing, number: int = 0) -> IssuedOperation | None:
        """Note an operation that begins; None where the host waits in it and so knows its end."""
        if self._unfinished is None:
            return None
        return self._unfinished.issued(self._where(name), self._turn, work, number)

    def awaited(self, operation: IssuedOperation | None) -> None:
        """Note that what the device is given from now on comes after `operation`."""
        if self._unfinished is not None and operation is not None:
            self._unfinished.awaited(operation)

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Mark what happens inside as a read by the host of what the device has computed.

        The host waits there for all that the device was given, and so for its operations with
        others. Where nothing is behind the host, a read takes no time and is not marked.
        """
        if self._unfinished is None or self._waits is None:
            yield
            return
        self._waits.read(what, self._oldest_wait)
        if self._fingerprints is not None:
            self._fingerprints.read_device()
        try:
            yield
        finally:
            if self._fingerprints is not None:
                self._fingerprints.go_on(0)
            self._waits.leave()

    def _oldest_wait(self) -> UnfinishedWait | None:
        found = None if self._unfinished is None else self._unfinished.oldest()
        return None if found is None else (found.name, found.turn, found.number)

    def _where(self, name: str) -> str:
        return f"{name} at {self._task}" if self._task else name

    def record(self, kind: str, name: str, *, start: float) -> None:
        """Write one event that began at `start` and ends now."""
        self.ended(BegunCall(kind, name, start), None)

    def ended(self, call: BegunCall, waited: WaitTime | None) -> None:
        """Write the event of a call that ends now and was `waited` for."""
        event = Event(
            kind=call.kind,
            name=call.name,
            axis=call.axis,
            stage=self.stage,
            microbatch=self.microbatch if call.microbatch is None else call.microbatch,
            bytes=call.num_bytes,
            start=call.start,
            end=self.now(),
            rank=self.run_rank,
            waited_s=0.0 if waited is None else waited.seconds,
        )
        if waited is None or waited.begin is None:
            self.sink.record(event)
        else:
            self._marked.append(_MarkedEvent(event, None, None, waited))
        if call.far_bytes:
            self.far_bytes[call.axis] += call.far_bytes

    @contextmanager
    def action(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Record what happens inside as one pipeline action."""
        self.stage, self.microbatch = stage, microbatch
        try:
            with self.span(kind, f"{kind}{stage}.{microbatch}"):
                yield
        finally:
            self.stage, self.microbatch = None, None

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Record what happens inside, at the times when the device runs it."""
        start, clock = self.now(), self._clock
        message, self._message = self._message, None
        begin = None if clock is None else clock.mark()
        try:
            yield
        finally:
            if clock is None or begin is None:
                self.ended(BegunCall(kind, name, start), message)
            else:
                where, at = self.stage, self.microbatch
                event = Event(kind=kind, name=name, stage=where, microbatch=at, rank=self.run_rank)
                self._marked.append(_MarkedEvent(event, begin, clock.mark(), message))

    def settle(self) -> None:
        """Write down the events whose times only the device knows, and set its clock anew.

        It waits until the device has run all that it was given: so its place is behind a read that
        has waited for that anyway.
        """
        marked, self._marked = self._marked, []
        if self._clock is None:
            return
        with self.reading("the times of actions"):
            for one in marked:
                self.sink.record(one.settled(self._clock, self._zero))
            self._clock.restart()
