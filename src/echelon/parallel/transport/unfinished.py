# SPDX-License-Identifier: Apache-2.0
"""The operations that a rank has issued and that its device has not come past, oldest first.

Over Gloo the host waits inside of an operation, and its mark says for what. Over NCCL `wait` only
makes the device wait: the host runs on to the next value that it reads, and stands there if a peer
never came. What it waits for then is the oldest operation of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


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
        """Hold what is known when it is issued."""
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
