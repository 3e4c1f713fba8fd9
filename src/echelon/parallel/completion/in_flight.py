# SPDX-License-Identifier: Apache-2.0
"""The ledger of operations that complete late: what runs, what is free, and the races found.

An operation works on private copies from its start. What it reads must be the same when it is
awaited; what it fills holds poison until then. So a run whose code is right goes on as ever, and
one that reads, writes or frees too early does so in the open, on every machine and in every run.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import PurePath
from random import Random
from threading import RLock, local

import torch

from echelon.parallel.completion.memory import (
    Span,
    is_poison,
    overlap,
    part_of,
    poison,
    private_copy,
    same_bits,
    span_of,
    storage_of,
    touches,
    without,
)
from echelon.parallel.completion.streams import COMPUTE, Access, Moment, StreamOrder, StreamWork


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationName:
    """Name an operation: what it does, of what, over which axis (or to which place)."""

    kind: str
    name: str
    axis: str

    def __str__(self) -> str:
        """Return it as users read it."""
        return f"{self.kind} {self.name}".strip()


ALL_GATHER = "all_gather"
"""The kind of operation whose input may be a part of its output, and is there all the time."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor of the engine, and its private copy."""


@dataclass(slots=True, kw_only=True, eq=False)
class LateOperation:
    """An operation that has begun and is not yet awaited."""

    name: OperationName
    """What it is."""
    reads: Sequence[Pair]
    """What it reads, each with what it was at the start."""
    writes: Sequence[Pair]
    """What it fills, each with where it really lands."""
    complete: Callable[[], None]
    """Return when the transport has done all of it; a second call does nothing."""
    must_wait: bool
    """Whether it is a mistake never to wait for it."""
    step: int
    """The step in which it began."""
    at: str
    """Where in the code."""
    landed: bool = False
    """Whether its result is to be seen."""
    lost: bool = False
    """Whether memory that it fills was freed under it."""
    filled: list[Span] = field(default_factory=list)
    """The addresses that it fills."""
    storages: Sequence[int] = ()
    """The storages that it reads and fills."""
    end: Moment = field(default_factory=dict[str, int])
    """Its end on its stream."""


class InFlight:
    """Follow the operations of one rank, and tell of each race once."""

    def __init__(self, rank: int, seed: int, tell: Callable[[Race], None]) -> None:
        """Begin with nothing in flight; each race is given to `tell` at once."""
        self.rank, self.step, self.num_operations = rank, 0, 0
        self.random = Random(f"{seed}-{rank}")
        self._tell, self._lock, self._thread = tell, RLock(), local()
        self._running: list[LateOperation] = []
        self._storages: Counter[int] = Counter()
        self._free: dict[int, tuple[Span, OperationName]] = {}
        self._last_in: dict[int, OperationName] = {}
        self._told: set[tuple[RaceKind, str]] = set()
        self._raced: set[str] = set()
        self.order = StreamOrder(self._unordered)
        """Accesses of all streams."""
        self._shown: list[LateOperation] | None = None
        self._hidden: set[LateOperation] = set()

    @property
    def watches(self) -> bool:
        """True if this thread is to be watched."""
        return not getattr(self._thread, "quiet", 0)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let this thread touch any memory."""
        self._thread.quiet = getattr(self._thread, "quiet", 0) + 1
        try:
            yield
        finally:
            self._thread.quiet -= 1

    def begin(
        self,
        name: OperationName,
        complete: Callable[[], None],
        *,
        reads: Sequence[Pair] = (),
        writes: Sequence[Pair] = (),
        must_wait: bool = True,
        stream: str = "",
    ) -> LateOperation:
        """Enter an operation that has started on private copies; poison what it is to fill.

        `stream` has been given its work (`StreamOrder.give`); "" where threads note its accesses.
        """
        kept = [tensor for tensor, _ in reads] if name.kind == ALL_GATHER else []
        parts = [
            (part, part_of(private, tensor, part))
            for tensor, private in writes
            for part in without(tensor, kept)
        ]
        operation = LateOperation(
            name=name,
            reads=[(tensor, copy) for tensor, copy in reads if tensor.numel()],
            writes=parts,
            complete=complete,
            must_wait=must_wait,
            step=self.step,
            at=place_in_code(),
            filled=[span_of(part) for part, _ in parts],
            storages=[storage_of(tensor) for tensor, _ in (*reads, *writes)],
        )
        with self._lock, self.unwatched():
            for tensor, _ in reads:
                self.use(tensor, by=str(name), writes=False, reads=True)
            for part, _ in parts:
                self.use(part, by=str(name), writes=True, reads=False)
                poison(part)
            if stream:
                work = StreamWork(by=str(name), axis=name.axis, at=operation.at)
                for pairs, fills in ((reads, False), (writes, True)):
                    for tensor, _ in pairs:
                        self.order.uses(stream, tensor, work, writes=fills)
                operation.end = self.order.moment(stream)
            self._running.append(operation)
            self._storages.update(operation.storages)
            self.num_operations += 1
        return operation

    def land(self, operation: LateOperation) -> None:
        """Wait for an operation and let its result be seen; a second call returns at once."""
        if operation.landed or (self._shown is not None and operation in self._shown):
            return
        operation.complete()
        with self._lock, self.unwatched():
            self._check(operation)
            self._show(operation)
            if self._shown is not None and operation in self._hidden:
                self._shown.append(operation)
                return
            self._end(operation)
            for start, _ in operation.filled:
                self._last_in[start] = operation.name

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Let results that are awaited inside be seen inside only.

        Who looks at a rank between its steps must not wait on its behalf.
        """
        self._shown, self._hidden = [], {one for one in self._running if one.must_wait}
        with self.unwatched():
            try:
                yield
            finally:
                shown, self._shown = self._shown, None
                for operation in shown:
                    for part, _ in operation.writes:
                        poison(part)

    def end_step(self) -> None:
        """Tell of what no step waited for; an operation may end in the step after its own."""
        for operation in [one for one in self._running if one.must_wait]:
            if operation.step < self.step:
                says = f"it began in step {operation.step}, and no step waits for it"
                self._race(RaceKind.NEVER_AWAITED, operation.name, says, operation)
                self._give_up(operation)
        self.step += 1

    def close(self) -> None:
        """Let the transport end what is under way: its memory goes after this."""
        for operation in list(self._running):
            self._give_up(operation)

    def use(self, tensor: torch.Tensor, *, by: str, writes: bool, reads: bool) -> None:
        """Look at a tensor that is about to be used: nothing in flight or free may be in it."""
        if not self._storages[storage_of(tensor)]:
            return
        with self._lock, self.unwatched():
            for operation in self._running:
                if any(touches(tensor, filled) for filled in operation.filled):
                    kind = RaceKind.USED if reads else RaceKind.CHANGED
                    how = "used" if reads else "overwritten"
                    self._race(kind, operation.name, f"its result is {how} by {by}")
                elif writes and any(touches(tensor, span_of(read)) for read, _ in operation.reads):
                    self._race(RaceKind.CHANGED, operation.name, f"its input is changed by {by}")
            for freed, name in list(self._free.values()):
                if touches(tensor, freed):
                    self._race(RaceKind.USED_FREED, name, f"its memory is used by {by}")

    def ran(
        self, by: str, used: Sequence[tuple[torch.Tensor, bool]], made: Iterable[torch.Tensor]
    ) -> None:
        """Note that a kernel has used tensors, each with whether it wrote it, and made others."""
        work = StreamWork(by=by, at=place_in_code())
        for tensor, writes in (*used, *((tensor, True) for tensor in made)):
            self.order.uses(COMPUTE, tensor, work, writes=writes)

    def _unordered(self, earlier: Access, later: Access) -> None:
        """Tell of two accesses without an order, unless their operation races in another way."""
        if self._raced.isdisjoint((earlier.work.by, later.work.by)):
            # A result that is used too early has the name of the operation that makes it.
            early = earlier.work.axis and (earlier.writes or not later.work.axis)
            operation = earlier.work if early else later.work
            name = OperationName(kind="", name=operation.by, axis=operation.axis)
            says = f"nothing orders two accesses of the same bytes: {earlier}; {later}"
            self._race(RaceKind.UNORDERED, name, says)

    def free(self, memory: torch.Tensor) -> bool:
        """Learn that memory is given back, and poison it; False where it was free already."""
        span = span_of(memory)
        if not span[1]:
            return True
        name = self._last_in.get(span[0], OperationName(kind="", name="a buffer", axis=""))
        with self._lock, self.unwatched():
            if span[0] in self._free:
                self._race(RaceKind.FREED_TWICE, name, "its memory is given back twice")
                return False
            for operation in self._running:
                spans = [*operation.filled, *(span_of(read) for read, _ in operation.reads)]
                if any(overlap(span, one) for one in spans):
                    says = "its memory is given back before anybody has waited for it"
                    self._race(RaceKind.FREED, operation.name, says)
                    operation.lost = True
            poison(memory)
            self._free[span[0]] = span, name
            self._storages[storage_of(memory)] += 1
        return True

    def lend(self, memory: torch.Tensor) -> None:
        """Learn that memory has an owner again, or is gone for good."""
        with self._lock:
            if self._free.pop(memory.data_ptr(), None) is not None:
                self._storages[storage_of(memory)] -= 1
            self._last_in.pop(memory.data_ptr(), None)

    def _check(self, operation: LateOperation) -> None:
        """Compare what it reads with what that was, and see that its result is as it was left."""
        if operation.lost:
            return
        for tensor, before in operation.reads:
            there = span_of(tensor)[1] and tensor.untyped_storage().nbytes()
            if there and not same_bits(private_copy(tensor), before):
                says = f"its input {list(tensor.shape)} is not what it was at the start"
                self._race(RaceKind.CHANGED, operation.name, says)
        for part, _ in operation.writes:
            if not is_poison(part):
                says = f"somebody else wrote into its result [{part.numel()}]"
                self._race(RaceKind.CHANGED, operation.name, says)

    def _show(self, operation: LateOperation) -> None:
        for part, private in operation.writes if not operation.lost else ():
            part.data.copy_(private)

    def _give_up(self, operation: LateOperation) -> None:
        operation.complete()
        self._end(operation)

    def _end(self, operation: LateOperation) -> None:
        operation.landed = True
        self._running.remove(operation)
        self._storages.subtract(operation.storages)

    def _race(
        self, kind: RaceKind, name: OperationName, says: str, began: LateOperation | None = None
    ) -> None:
        """Tell of a race, once; of one that is seen at the end only, as of where it `began`."""
        if (kind, str(name)) in self._told:
            return
        self._told.add((kind, str(name)))
        self._raced.add(str(name))
        self._tell(
            Race(
                kind=kind,
                operation=str(name),
                axis=name.axis,
                step=self.step if began is None else began.step,
                rank=self.rank,
                at=place_in_code() if began is None else began.at,
                says=says,
                when_s=time.monotonic(),
            )
        )


class RaceKind(StrEnum):
    """Name what was done too early, or never."""

    NEVER_AWAITED = "never awaited"
    USED = "used before it was awaited"
    CHANGED = "changed in flight"
    FREED = "freed in flight"
    USED_FREED = "used after it was freed"
    FREED_TWICE = "freed twice"
    UNORDERED = "not ordered by streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Say what one rank did with memory that was not its to use.

    `at` is where in the code, `when_s` the time of a clock that the ranks of a machine share.
    """

    kind: RaceKind
    operation: str
    axis: str
    step: int
    rank: int
    at: str
    says: str
    when_s: float

    def to_json(self) -> str:
        """Return the race as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Race:
        """Return the race of a line that `to_json` made."""
        table = json.loads(line)
        return cls(**{**table, "kind": RaceKind(table["kind"])})


def place_in_code() -> str:
    """Return the two innermost places in the code that are neither torch's nor part of this."""
    frame, found = sys._getframe(1), list[str]()
    while frame is not None and len(found) < _NUM_PLACES:
        file = _file_told(frame.f_code.co_filename)
        if file:
            found.append(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return ", called at ".join(found)


_NUM_PLACES = 2
"""A kernel says little without who called it."""

_OWN = (
    ("echelon", "parallel", "completion"),
    ("echelon", "parallel", "transport"),
    ("echelon", "proof", "verify"),
)
"""Folders whose frames say nothing about who uses a tensor."""

_PLUMBING = frozenset({"buffers", "contextlib", "tensor_memory"})
"""Modules of which the same holds."""


@cache
def _file_told(path: str) -> str:
    """Return a file as it is told, or nothing where it is not."""
    parts = PurePath(path).parts
    if (
        not path.endswith(".py")
        or parts[-4:-1] in _OWN
        or "site-packages" in parts
        or PurePath(path).stem in _PLUMBING
    ):
        return ""
    return "/".join(parts[-3:])
