# SPDX-License-Identifier: Apache-2.0
"""Order of accesses to memory: a vector clock for each stream.

A device runs the work of one stream in order, and streams side by side: kernels, copies up, copies
down, a communicator, and threads that move bytes of files. The host gives work to all of them. On a
CPU the work is done at once, so a missing wait gives the right numbers. Here each access has the
vector clock of its stream: the latest access that it knows of every other stream. A clock grows by

    work that the host gives to a stream     the clock of the host
    an event that a stream waits for         the clock of the event
    a wait of the host or of a thread        the same; later work of the host has it, too

An allocator gives freed memory to later kernels, and knows of copies only what these know, unless a
copy is recorded (`CopyStreams.record_use`).

If the later of two accesses of the same bytes does not know the earlier one, and one of them is a
write, they may come in either order: they are reported as a pair.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock, local
from typing import Any, NamedTuple

import torch

from echelon.parallel.completion.memory import Span, extent_of
from echelon.parallel.offload.host_memory import CompletedEvent

COMPUTE, HOST = "compute", "host"
"""The stream of kernels; the thread that gives work to streams."""

Moment = Mapping[str, int]
"""A point in the work of a stream: the latest access of every stream that is known there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWork:
    """A kernel, a copy, a collective or a transfer of a file, by name."""

    by: str
    """The operation."""
    axis: str = ""
    """The axis or place of an operation; "" of a kernel."""
    at: str = ""
    """The place in the code."""


class Access(NamedTuple):
    """One read or write of memory."""

    work: StreamWork
    stream: str
    time: int
    """The number of the access among all of the rank."""
    writes: bool

    def __str__(self) -> str:
        """Return it as users read it."""
        place = f" at {self.work.at}" if self.work.at else ""
        does = "writes" if self.writes else "reads"
        return f"{self.work.by} {does} on stream {self.stream}{place}"


_GIVEN_TO_OTHERS = StreamWork(by="the allocator, which does not know the copy,")

Unordered = Callable[[Access, Access], None]
"""Called with an access, and a later access of the same bytes that does not know it."""


class StreamOrder:
    """Follow the accesses of one rank, stream by stream."""

    def __init__(self, unordered: Unordered) -> None:
        """Begin without any."""
        self._unordered, self._lock, self._thread = unordered, RLock(), local()
        self.follows = False
        """True once copies or communicators use memory; a rehearsal notes no accesses before."""
        self._count = 0
        self._clocks: dict[str, dict[str, int]] = {}
        self._accesses: dict[object, dict[str, dict[tuple[int, int, bool], Access]]] = {}
        self._living: dict[int, weakref.ref[Any]] = {}
        self._copies: set[str] = set()
        self._recorded: set[int] = set()

    @property
    def here(self) -> str:
        """The stream of this thread: the host, or the work that it runs (`on`)."""
        return getattr(self._thread, "stream", HOST)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Let this thread run the work of a stream."""
        before, self._thread.stream = self.here, stream
        try:
            yield
        finally:
            self._thread.stream = before

    def moment(self, stream: str) -> Moment:
        """Return the clock of a stream with all work that it has been given."""
        with self._lock:
            return dict(self._clocks.get(stream, {}))

    def wait(self, stream: str, moment: Moment) -> None:
        """Add a moment to the clock of a stream; of the host, also to the clock of kernels."""
        with self._lock:
            for name in (stream, COMPUTE) if stream == HOST else (stream,):
                clock = self._clocks.setdefault(name, {})
                for other, time in moment.items():
                    clock[other] = max(time, clock.get(other, 0))

    def give(self, stream: str, *after: Moment) -> None:
        """Give a stream work from this thread, which waits for the moments `after`."""
        for moment in (self.moment(self.here), *after):
            self.wait(stream, moment)

    def copies_on(self, stream: str) -> None:
        """Learn of a stream of copies, of which an allocator knows nothing by itself."""
        self._copies.add(stream)

    def record_use(self, tensor: torch.Tensor) -> None:
        """Let an allocator know the copies of a tensor."""
        self._recorded.add(self._key_of(tensor))

    def uses(self, stream: str, tensor: torch.Tensor, work: StreamWork, *, writes: bool) -> None:
        """Note that work of a stream reads or writes a tensor."""
        self.uses_bytes(stream, (self._key_of(tensor), extent_of(tensor)), work, writes=writes)

    def _key_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._living:
            # Another storage may have the same key later.
            self._living[key] = weakref.ref(storage, lambda _: self._forget(key))
        return key

    def uses_bytes(
        self, stream: str, part: tuple[object, Span], work: StreamWork, *, writes: bool
    ) -> None:
        """Note that work of a stream reads or writes bytes of a memory, such as a file."""
        memory, (begin, end) = part
        with self._lock:
            clock = self._clocks.setdefault(stream, {})
            self._count += 1
            clock[stream] = self._count
            access = Access(work=work, stream=stream, time=self._count, writes=writes)
            by_stream = self._accesses.setdefault(memory, {})
            by_stream.setdefault(stream, {})[begin, end, writes] = access
            if len(by_stream) == 1:
                return
            unknown = [
                earlier
                for other, accesses in by_stream.items()
                if other != stream
                for (first, last, wrote), earlier in accesses.items()
                if earlier.time > clock.get(other, 0)
                and (writes or wrote)
                and (begin < last and first < end)
            ]
            for earlier in sorted(unknown, key=lambda earlier: -earlier.time):
                self._unordered(earlier, access)

    def forget(self, stream: str) -> None:
        """Forget the accesses of a stream whose results nobody uses."""
        with self._lock:
            for by_stream in [*self._accesses.values()]:
                by_stream.pop(stream, None)

    def _forget(self, key: int) -> None:
        self._living.pop(key, None)
        by_stream = self._accesses.pop(key, {})
        is_recorded = key in self._recorded
        self._recorded.discard(key)
        if is_recorded or COMPUTE not in by_stream:
            return
        known = self.moment(COMPUTE)
        given = Access(work=_GIVEN_TO_OTHERS, stream=COMPUTE, time=self._count, writes=True)
        for stream in self._copies.intersection(by_stream):
            latest = max(by_stream[stream].values(), key=lambda access: access.time)
            if latest.time > known.get(stream, 0):
                self._unordered(latest, given)


class OrderedMark(CompletedEvent):
    """A point in the work of a stream, as the copies of an engine know it."""

    def __init__(self, order: StreamOrder, moment: Moment) -> None:
        """Hold the moment."""
        self.order, self.moment = order, moment

    def synchronize(self) -> None:
        """Let this thread know the moment."""
        self.order.wait(self.order.here, self.moment)
