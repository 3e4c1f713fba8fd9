# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device that are done when somebody waits for their end, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from echelon.parallel.completion.in_flight import InFlight, LateOperation, OperationName
from echelon.parallel.completion.memory import private_copy
from echelon.parallel.offload.copy_streams import (
    CompletedEvent,
    CopyDirection,
    CopyStreams,
    StreamEvent,
    TensorCopy,
)


class LateCopyEnd(CompletedEvent):
    """The mark of the end of a copy, which ends when it is waited for."""

    def __init__(self, land: Callable[[], None]) -> None:
        """Hold what ends the copy and all those before it in its direction."""
        self._land = land

    def synchronize(self) -> None:
        """Return when the copy has ended."""
        self._land()


class LateCopyStreams(CopyStreams):
    """Copies that end late, those of a direction in the order in which they were asked for."""

    def __init__(self, flight: InFlight, what: str) -> None:
        """Copy `what` it is that rests on the host, by name."""
        self._flight, self._what = flight, what
        self._queues: dict[CopyDirection, deque[LateOperation]] = {"up": deque(), "down": deque()}

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Start to copy once the marks are passed; return the mark of the end."""
        for mark in after:
            mark.synchronize()
        with self._flight.unwatched():
            sources = [(source.detach(), private_copy(source)) for _, source in copies]
        operation = self._flight.begin(
            OperationName(kind=f"copy {direction}", name=self._what, axis="host"),
            lambda: None,
            reads=sources,
            writes=[(target, copy) for (target, _), (_, copy) in zip(copies, sources, strict=True)],
            must_wait=False,
        )
        queue = self._queues[direction]
        queue.append(operation)

        def land() -> None:
            while not operation.landed and queue:
                self._flight.land(queue.popleft())

        return LateCopyEnd(land)

    def wait_for(self, mark: StreamEvent) -> None:
        """End what the computation waits for."""
        mark.synchronize()
