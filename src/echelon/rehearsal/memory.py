# SPDX-License-Identifier: Apache-2.0
"""What lives in the memory of a rank, storage by storage, and what each is for.

Every storage that an operation makes is counted from its making to its end, with no rounding: what
an allocator adds, NCCL's buffers and the context of CUDA are terms of the plan, not of this.

Slices that rest on the host or in files are shapes, too: on the device are only the buffers of
`parallel/offload/copying_store.py`. Copies move nothing, but the streams of kernels, copies and
communicators have vector clocks (`parallel/completion/streams.py`): two accesses of the same bytes
that no event orders are at fault.

On NCCL a collective runs beside the computation, on a stream of its own, from its issue to the
wait. Until then what it writes may be neither read nor written, what it reads not written, and no
memory of it may be given back: who does so is at fault. Where a part of a tensor is given to it,
only that part is taken.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from echelon.parallel.completion.memory import extent_of
from echelon.parallel.completion.streams import (
    COMPUTE,
    Access,
    OrderedMark,
    StreamOrder,
    StreamWork,
)
from echelon.parallel.offload.copying_store import CopiedFetch, CopyingOffloadStore
from echelon.parallel.offload.host_memory import (
    BoundedBuffers,
    CopyDirection,
    CopyStreams,
    StreamEvent,
    TensorCopy,
    storage_key,
)
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.tensor_memory import BufferPool

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
STATE_TERMS = (PARAMETERS, GRADIENTS, OPTIMIZER)
GATHERED, BUFFERS = "gathered", "buffers"
ACTIVATIONS, MESSAGES = "activations", "messages"
HOST = "host"
"""What is in the memory of the host, or in files: it is not counted."""
OTHER = "other"
"""What a step reads (its tokens), and what lives between steps and is none of the others."""

Released = Callable[[int], None]
"""Told the storage whose memory is given back while views of it live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Say what lived when an action had ended, by term, and the most of all while it ran."""

    action: str
    kept: Mapping[str, int]
    peak_bytes: int


class MemoryMeter:
    """Count what lives, by term; what is made now is for `term`."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.term = OTHER
        self.points: list[MemoryPoint] = []
        self.at_peak: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self._living: dict[int, tuple[int, str, object]] = {}  # bytes, term, what tells of the end
        self._by_term: Counter[str] = Counter()
        self._bytes = self._peak = self._action_peak = 0

    @property
    def peak_bytes(self) -> int:
        """Return the most that lived at one time since the peak was last forgotten."""
        return self._peak

    def made(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._living:
            num_bytes, term = storage.nbytes(), self.term
            end = weakref.ref(storage, lambda _: self._end(key))
            self._living[key] = (num_bytes, term, end)
            self._add(term, num_bytes)

    def is_for(self, term: str, tensors: Sequence[torch.Tensor]) -> None:
        """Say what the storages of tensors are for."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self._living:
                num_bytes, before, end = self._living[key]
                if before == term:
                    continue
                self._add(before, -num_bytes)
                self._add(term, num_bytes)
                self._living[key] = (num_bytes, term, end)

    def given_back(self, tensor: torch.Tensor) -> None:
        """Learn that the memory of a tensor may be used again, whatever still points to it."""
        key = storage_key(tensor)
        num_bytes, term, end = self._living[key]
        self._add(term, -num_bytes)
        self._living[key] = (0, term, end)

    def forget_peak(self) -> None:
        """Look for peaks from now on."""
        self.points.clear()
        self._peak = self._action_peak = self._bytes
        self.at_peak, self.most = dict(self._by_term), dict(self._by_term)

    def action_ended(self, action: str) -> None:
        """Write down what an action has left."""
        point = MemoryPoint(action=action, kept=self.now(), peak_bytes=self._action_peak)
        self.points.append(point)
        self._action_peak = self._bytes

    def now(self) -> dict[str, int]:
        """Return what lives, by term."""
        return {term: count for term, count in self._by_term.items() if count}

    @contextmanager
    def within(self, term: str) -> Iterator[None]:
        """Count what is made inside as `term`."""
        before, self.term = self.term, term
        try:
            yield
        finally:
            self.term = before

    def _add(self, term: str, num_bytes: int) -> None:
        if term == HOST:
            return
        now = self._by_term[term] = self._by_term[term] + num_bytes
        self._bytes = total = self._bytes + num_bytes
        if num_bytes <= 0:
            return
        if now > self.most.get(term, 0):
            self.most[term] = now
        self._action_peak = max(self._action_peak, total)
        if total > self._peak:
            self._peak = total
            self.at_peak = dict(self._by_term)

    def _end(self, key: int) -> None:
        num_bytes, term, _ = self._living.pop(key)
        self._add(term, -num_bytes)


class MeteredPool(BufferPool):
    """Lend memory to buckets that are not always whole; of a GPU its allocator does so."""

    def __init__(self, device: torch.device, meter: MemoryMeter, released: Released) -> None:
        """Tell `meter` of what is lent and given back, and `released` of the latter."""
        super().__init__(device)
        self._meter, self._released = meter, released

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return new memory: two that are lent at the same time are two."""
        piece = super().take(num_bytes)
        self._meter.made(piece)
        return piece

    def give_back(self, piece: torch.Tensor) -> None:
        """Take memory back; it is never lent again, so that each loan is a storage of its own."""
        self._released(storage_key(piece))
        self._meter.given_back(piece)


class RehearsedBuffers(BoundedBuffers[CopiedFetch]):
    """Buffers that take the largest set at once: in later steps all of them do."""

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, and grow it."""
        super().give_back(buffer)
        if buffer.nbytes < self._largest:
            self._free[-1] = self._allocate(self._largest)


class RehearsedOffloadStore(CopyingOffloadStore):
    """Rest off the device as shapes; bring sets to its buffers, and order copies as a GPU does."""

    def __init__(
        self, device: torch.device, meter: MemoryMeter, order: StreamOrder, *, num_buffers: int
    ) -> None:
        """Begin with nothing."""
        self._meter = meter
        streams = RehearsedCopyStreams(order, "slices")
        super().__init__(
            MemoryOffloadStore("host", self._room), device, streams, num_buffers=num_buffers
        )
        self._buffers = RehearsedBuffers(num_buffers, self._allocate)

    def _allocate(self, size: int) -> torch.Tensor:
        with self._meter.within(BUFFERS):
            return super()._allocate(size)

    def _room(self, num_bytes: int) -> torch.Tensor:
        with self._meter.within(HOST):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class RehearsedCopyStreams(CopyStreams):
    """Copies between host and device that move nothing, and are ordered by their marks."""

    def __init__(self, order: StreamOrder, name: str) -> None:
        """Copy slices or activations (`name`); accesses are noted from now on."""
        self._order, self._name = order, name
        order.follows = True

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Return the mark of the end."""
        order, stream = self._order, f"{self._name} {direction}"
        order.copies_on(stream)
        order.give(stream, *(mark.moment for mark in after if isinstance(mark, OrderedMark)))
        work = StreamWork(by=f"copy {direction} {self._name}", axis="host", at=where_in_package())
        for target, source in copies:
            order.uses(stream, source, work, writes=False)
            order.uses(stream, target, work, writes=True)
        return OrderedMark(order, order.moment(stream))

    def record_event(self) -> StreamEvent:
        """Return the mark of the kernels so far."""
        return OrderedMark(self._order, self._order.moment(COMPUTE))

    def wait_for(self, mark: StreamEvent) -> None:
        """Let kernels wait for a mark."""
        assert isinstance(mark, OrderedMark), "a mark of other streams"
        self._order.wait(COMPUTE, mark.moment)

    def record_use(self, tensor: torch.Tensor) -> None:
        """Let the allocator know the copies of a tensor."""
        self._order.record_use(tensor)


MISSING_WAIT, RELEASED_IN_FLIGHT = "missing-wait", "released-in-flight"
NEVER_AWAITED = "never-awaited"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Bytes of a storage that an operation has been given."""

    begin: int
    end: int
    written: bool
    issue: int
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Misuse:
    """A rule that one rank breaks by itself: the operation, and its place in the code."""

    rule: str
    """MISSING_WAIT, RELEASED_IN_FLIGHT, NEVER_AWAITED or OTHER_DATA."""
    text: str


class MemoryInFlight:
    """Know what is under way on one rank."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.misuses: list[Misuse] = []
        self._regions: dict[int, list[_Region]] = {}
        self._of_issue: dict[int, list[int]] = {}
        self._told: set[str] = set()
        self._raced: set[str] = set()

    def begin(
        self, issue: int, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Learn that operation `issue` has been given tensors; they live until it is awaited."""
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                begin, end = extent_of(tensor)
                key = storage_key(tensor)
                region = _Region(
                    begin=begin,
                    end=end,
                    written=written,
                    issue=issue,
                    name=name,
                    tensor=tensor.detach(),
                )
                self._regions.setdefault(key, []).append(region)
                self._of_issue.setdefault(issue, []).append(key)

    def end(self, issue: int) -> None:
        """Learn that an operation was awaited."""
        for key in self._of_issue.pop(issue, ()):
            left = [one for one in self._regions.get(key, ()) if one.issue != issue]
            if left:
                self._regions[key] = left
            else:
                self._regions.pop(key, None)

    def held_of(self, tensors: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return those tensors of whose storage something is under way."""
        regions = self._regions
        if not regions:
            return ()
        return [tensor for tensor in tensors if storage_key(tensor) in regions]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether something of the storage of a tensor is under way."""
        return storage_key(tensor) in self._regions

    def touched(self, tensor: torch.Tensor, *, write: bool, by: str, where: str) -> None:
        """Learn that the computation reads or writes a tensor."""
        regions = self._regions.get(storage_key(tensor), ())
        begin, end = extent_of(tensor)
        for region in regions:
            if (region.written or write) and begin < region.end and region.begin < end:
                does = "writes" if write else "reads"
                self._raced.add(region.name)
                self.tell(MISSING_WAIT, f"{by} at {where} {does} {region.name} before its wait")

    def released(self, key: int) -> None:
        """Learn that the memory of a storage is given back while its tensors live."""
        for region in self._regions.get(key, ()):
            self.tell(RELEASED_IN_FLIGHT, f"the memory of {region.name} is released in flight")

    def unordered(self, earlier: Access, later: Access) -> None:
        """Tell of two accesses without an order, unless their operation races in another way."""
        pair = (earlier.work.by, later.work.by)
        if self._raced.isdisjoint(pair):
            self._raced.add(later.work.by if later.work.axis else earlier.work.by)
            text = f"nothing orders two accesses of the same bytes: {earlier}; {later}"
            self.tell(MISSING_WAIT, text)

    def step_ended(self) -> None:
        """Tell of what nobody has awaited.

        Only parameters that are gathered may be under way, and sums of outer gradients that come
        late.
        """
        for regions in self._regions.values():
            for region in regions:
                if not region.name.startswith(("parameters.", "outer gradients.")):
                    self.tell(NEVER_AWAITED, f"nobody has awaited {region.name}")

    def tell(self, rule: str, text: str) -> None:
        """Note a misuse, each text once."""
        if text not in self._told:
            self._told.add(text)
            self.misuses.append(Misuse(rule=rule, text=text))


@contextmanager
def wrapped(methods: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace methods of objects; each replacement has the method as its first argument."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in methods]
    for owner, name, method in methods:
        setattr(owner, name, partial(method, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, method in reversed(before):
            delattr(owner, name)
            if method is not None:
                setattr(owner, name, method)


_PACKAGE = str(Path(__file__).parents[1])
_HERE = str(Path(__file__).parent)


def where_in_package() -> str:
    """Return the innermost place in this package that is not the rehearsal itself."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_HERE):
            return f"{Path(name).relative_to(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
