# SPDX-License-Identifier: Apache-2.0
"""Who writes what: ranks share out the parts of a folder, and each has some threads.

What is written does not depend on how many write it: parts are the same, and each goes to its own
place. The tensors that the threads of a rank hold together have at most the bytes of the largest
one and `SLACK_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Condition
from typing import Any, TypeVar

from echelon.core.errors import EchelonError
from echelon.launch.host import num_usable_cores
from echelon.training.checkpoint.communicator import (
    ObjectCommunicator,
    SingleRankCommunicator,
    run_on_all_ranks,
)
from echelon.training.weights.export import SCRATCH_BYTES

T = TypeVar("T")

MOST_THREADS = 8
"""Tensors that are made at a time where nobody says, as far as memory allows it."""
SLACK_BYTES = 32 * 2**20
"""Beside the largest tensor: small ones are made at the same time in it."""


def _nothing() -> None:
    """Do nothing."""


class TensorRoom:
    """Let threads make tensors of so many bytes together; one that is larger comes alone.

    Each counts with what it takes to make it. `begin` is called before each.
    """

    def __init__(self, num_bytes: int, begin: Callable[[], None] = _nothing) -> None:
        self._size, self._held, self._begin = num_bytes, 0, begin
        self._changed = Condition()

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Wait for room for a tensor of so many bytes, and keep it until the end."""
        self._begin()
        num_bytes += SCRATCH_BYTES
        with self._changed:
            while self._held and self._held + num_bytes > self._size:
                self._changed.wait()
            self._held += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= num_bytes
                self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPart:
    """Give a part of a folder that one thread writes: by name, in a file, of so many bytes.

    `largest` are the bytes of the largest tensor in it. What `write` returns is told to all ranks;
    it takes room for each tensor that it makes.
    """

    name: str
    file: str
    num_bytes: int
    largest: int
    write: Callable[[TensorRoom], Any]


class Writers:
    """The ranks that write a folder together, as one of them sees them."""

    def __init__(
        self,
        threads: int | None,
        exchange: ObjectCommunicator | None = None,
        tell: Callable[[str], None] = lambda _: None,
        *,
        begin: Callable[[], None] = _nothing,
        ranks_here: int = 1,
    ) -> None:
        """Write with `threads` threads: None for one on each core that `ranks_here` leave to it.

        `tell` hears which part was begun; `begin` is called before each tensor and each file that
        is checked, and may raise. No `exchange`: one rank.
        """
        self.exchange: ObjectCommunicator = exchange or SingleRankCommunicator()
        some = min(MOST_THREADS, int(num_usable_cores())) // ranks_here
        self._threads, self._tell, self.begin = threads or max(1, some), tell, begin

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on each rank, and return all results; an error says of which rank it is."""
        return run_on_all_ranks(self.exchange, lambda: self._named(action))

    def on_first(self, action: Callable[[], T]) -> T | None:
        """Run `action` on the first rank, and return its result on all of them."""
        first = self.exchange.index == 0
        return self.on_all(lambda: action() if first else None)[0]

    def write(self, parts: Sequence[FolderPart]) -> Mapping[str, Any]:
        """Write parts, each by one rank; return what came of each, by name, in their order."""
        own = shared_out(parts, self.exchange.size)[self.exchange.index]
        found: dict[str, Any] = {}
        for one in self.on_all(lambda: self._write_own(own)):
            found.update(one)
        return {part.name: found[part.name] for part in parts}

    def _write_own(self, own: Sequence[FolderPart]) -> dict[str, Any]:
        largest = max((part.largest for part in own), default=0)
        room = TensorRoom(SLACK_BYTES + largest, self.begin)

        def write(part: FolderPart) -> tuple[str, Any]:
            self._tell(f"writing {part.name}")
            return part.name, part.write(room)

        with ThreadPoolExecutor(max_workers=self._threads) as pool:
            return dict(pool.map(write, own))

    def _named(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except EchelonError as error:
            if self.exchange.size == 1:
                raise
            who = f"rank {self.exchange.index}"
            problems = [replace(one, message=f"{who}: {one.message}") for one in error.problems]
            raise type(error)(problems) from error


def shared_out(parts: Sequence[FolderPart], ranks: int) -> list[list[FolderPart]]:
    """Return the parts of each rank, in order: whole files, where there is one for each.

    The largest goes to whoever has least, so that all have about as many bytes.
    """
    files: dict[str, list[FolderPart]] = {}
    for part in parts:
        files.setdefault(part.file, []).append(part)
    groups = list(files.values()) if len(files) >= ranks else [[part] for part in parts]
    bytes_of = [sum(part.num_bytes for part in group) for group in groups]
    held, owners = [0] * ranks, [0] * len(groups)
    for place in sorted(range(len(groups)), key=lambda one: -bytes_of[one]):
        owners[place] = held.index(min(held))
        held[owners[place]] += bytes_of[place]
    return [
        [
            part
            for group, owner in zip(groups, owners, strict=True)
            if owner == rank
            for part in group
        ]
        for rank in range(ranks)
    ]
