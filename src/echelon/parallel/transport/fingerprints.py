# SPDX-License-Identifier: Apache-2.0
"""What a rank writes into its ring for each operation, and what its device has not come past.

Names, shapes, tasks and lines are looked up by what they are, so a text is made the first time
only. The line is the innermost one outside of the transport and of torch: the operation's own
place in the engine or in the program of a user.

Over Gloo the host waits inside of an operation, and its mark says for what. Over NCCL `wait` only
makes the device wait: the host runs on to the next value that it reads, and stands there if a peer
never came. What it waits for then is the oldest operation that is unfinished.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol

import torch

from echelon.launch.desync.ring import FingerprintRing
from echelon.parallel.transport.messages import PendingWorks

_PACKAGE = Path(__file__).parents[2]
_INNER = (
    str(Path(__file__).parent),
    str(_PACKAGE / "parallel" / "completion"),
    str(Path(torch.__file__).parent),
)
"""Folders whose lines are not where an operation was called, but how."""


class Members(Protocol):
    """Ranks that torch has joined, who number their operations alike."""

    name: str
    called: str
    ranks: tuple[int, ...]
    sequences: dict[tuple[int, int] | None, int]


class OperationFingerprints:
    """Note the operations of one rank in its ring."""

    def __init__(self, ring: FingerprintRing) -> None:
        self._ring = ring
        self.task = ""
        """What the rank is at: an action of its schedule."""
        self._groups: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._tensors: dict[tuple[torch.Size, torch.dtype], int] = {}
        self._sites: dict[tuple[int, int], int] = {}
        self._codes: dict[int, tuple[CodeType, bool]] = {}

    def issue(
        self,
        communicator: Members,
        axis: str,
        kind: str,
        name: str,
        tensor: torch.Tensor | None,
        ends: tuple[int, int] | None = None,
    ) -> int:
        """Note an operation that begins, and return its number."""
        ring = self._ring
        sequence = communicator.sequences.get(ends, 0) + 1
        communicator.sequences[ends] = sequence
        ranks = communicator.ranks
        called = communicator.called
        if not called:
            called = communicator.called = ring.joined(communicator.name or axis, ranks)
        group = self._groups.get((called, axis, ranks))
        if group is None:
            group = self._groups[called, axis, ranks] = ring.group(called, axis, ranks)
        described = 0
        if tensor is not None:
            form = (tensor.shape, tensor.dtype)
            found = self._tensors.get(form)
            if found is None:
                found = ring.tensor(form[0], str(form[1]).removeprefix("torch."))
                self._tensors[form] = found
            described = found
        source, target = (-1, -1) if ends is None else ends
        kind_text, name_text, task = ring.text(kind), ring.text(name), ring.text(self.task)
        return ring.issue(
            (group, sequence, kind_text, name_text, described, self._site(), task, source, target)
        )

    def wait(self, number: int) -> None:
        """Note that the rank waits in an operation."""
        self._ring.wait(number)

    def read_device(self) -> None:
        """Note that the host waits for the device."""
        self._ring.read_device()

    def go_on(self, ended: int) -> None:
        """Note that it waits no more; operation `ended` has ended, unless it is 0."""
        self._ring.go_on(ended)

    def wait_each(self, number: int, works: PendingWorks) -> None:
        """Wait for the messages of an operation, and note of which member each is."""
        since = time.monotonic()
        for work, member in zip(works.works, works.members, strict=True):
            self._ring.awaits(number, member, since)
            work.wait()

    def _site(self) -> int:
        """Return the number of the line that called the operation."""
        frame: FrameType | None = sys._getframe(2)
        innermost = frame
        while frame is not None and self._is_inner(frame.f_code):
            frame = frame.f_back
        # Backward of a GPU runs in a thread of torch's own, which nobody of ours has called.
        found = frame or innermost
        assert found is not None, "somebody called"
        key = (id(found.f_code), found.f_lasti)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._ring.text(line_of(found))
        return site

    def _is_inner(self, code: CodeType) -> bool:
        # Kept with the code, whose address could else become that of another.
        found = self._codes.get(id(code))
        if found is None:
            found = self._codes[id(code)] = (code, code.co_filename.startswith(_INNER))
        return found[1]


def line_of(frame: FrameType) -> str:
    """Return where a frame is: ``parallel/data.py:210 in start``; of other code the file's name."""
    path = Path(frame.f_code.co_filename)
    name = path.name
    if path.is_relative_to(_PACKAGE):
        name = str(path.relative_to(_PACKAGE))
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


class Finishing(Protocol):
    """Something under way, such as the work of a collective."""

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        ...


class DeviceMark(Protocol):
    """A point in the queue of a device."""

    def query(self) -> bool:
        """Return whether the device has come past it."""
        ...


class IssuedOperation:
    """One operation: what it is, its turn in an order of all ranks' work, and whether it ended.

    `number` is that of its fingerprint; 0 of none.
    """

    __slots__ = ("ended", "name", "number", "turn")

    def __init__(
        self, name: str, turn: int | None, ended: Callable[[], bool], number: int = 0
    ) -> None:
        self.name, self.turn, self.ended, self.number = name, turn, ended, number


class UnfinishedOperations:
    """Keep what was issued until it has ended; another thread may ask for the oldest."""

    def __init__(
        self,
        mark: Callable[[], DeviceMark],
        on_device: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Begin with nothing. `mark` puts a mark into the queue of the device.

        Questions are asked inside of `on_device`: a thread that has not chosen a GPU would use the
        first one, and hold memory there.
        """
        self._mark, self._on_device = mark, on_device
        self._operations: deque[IssuedOperation] = deque()

    def issued(
        self, name: str, turn: int | None, work: Finishing, number: int = 0
    ) -> IssuedOperation:
        """Note an operation that begins."""
        operation = IssuedOperation(name, turn, work.is_completed, number)
        self._operations.append(operation)
        return operation

    def awaited(self, operation: IssuedOperation) -> None:
        """Note that the device waits for `operation` before whatever it is given from now on.

        A mark stands for it from here on: its work holds the tensors that it wrote, which would
        live for as long as it does.
        """
        operation.ended = self._mark().query
        while self._operations and self._operations[0].ended():
            self._operations.popleft()

    def oldest(self) -> IssuedOperation | None:
        """Return the first operation that has not ended, or has failed; None where there is none.

        A thread that watches this rank calls it while the main thread goes on.
        """
        with self._on_device():
            for operation in tuple(self._operations):
                try:
                    ended = operation.ended()
                except RuntimeError:
                    ended = False
                if not ended:
                    return operation
        return None
