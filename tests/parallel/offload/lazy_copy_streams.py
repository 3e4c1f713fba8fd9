"""Copies and computation in any order that their marks allow: a GPU that dawdles where it may."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from threading import RLock

import torch

from echelon.parallel.offload.host_memory import (
    CompletedEvent,
    CopyDirection,
    CopyStreams,
    StreamEvent,
    TensorCopy,
)


@dataclass(slots=True, eq=False)
class LazyEvent(CompletedEvent):
    """Hold one thing to do, and what must be done before."""

    streams: LazyCopyStreams
    direction: str
    do: Callable[[], object]
    after: list[LazyEvent]
    done: bool = False

    def synchronize(self) -> None:
        """Do what is left up to here."""
        with self.streams.lock:
            while not self.done:
                self.streams.step(self)


@dataclass(slots=True)
class LazyCopyStreams(CopyStreams):
    """Do nothing until somebody waits, then as little as must be, and now and then more."""

    seed: int
    lock: RLock = field(default_factory=RLock)
    queues: dict[str, list[LazyEvent]] = field(default_factory=dict)
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        """Start the dice."""
        self.random = Random(self.seed)

    def compute(self, do: Callable[[], object], after: Sequence[LazyEvent] = ()) -> LazyEvent:
        """Give the device something to compute."""
        return self._push("compute", do, after)

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Give a direction something to copy."""
        held = list(copies)
        marks = [mark for mark in after if isinstance(mark, LazyEvent)]
        return self._push(
            direction, lambda: [target.copy_(source) for target, source in held], marks
        )

    def record_event(self) -> StreamEvent:
        """Mark the end of the computation so far."""
        return self._push("compute", lambda: None, ())

    def wait_for(self, mark: StreamEvent) -> None:
        """Let the computation wait."""
        assert isinstance(mark, LazyEvent)
        self._push("compute", lambda: None, [mark])

    def record_use(self, tensor: torch.Tensor) -> None:
        """Keep memory from being used again while something is to be done with it: all is held."""

    def step(self, wanted: LazyEvent) -> None:
        """Do one thing: of another direction at random, else what `wanted` needs first."""
        ready = [
            queue[0]
            for queue in self.queues.values()
            if queue and all(m.done for m in queue[0].after)
        ]
        chosen = self.random.choice(ready) if self.random.random() < 0.3 else self._first(wanted)
        chosen.do()
        chosen.done = True
        self.queues[chosen.direction].remove(chosen)

    def _first(self, wanted: LazyEvent) -> LazyEvent:
        head = self.queues[wanted.direction][0]
        missing = [mark for mark in head.after if not mark.done]
        return self._first(missing[0]) if missing else head

    def _push(
        self, direction: str, do: Callable[[], object], after: Sequence[LazyEvent]
    ) -> LazyEvent:
        with self.lock:
            mark = LazyEvent(self, direction, do, list(after))
            self.queues.setdefault(direction, []).append(mark)
            if self.random.random() < 0.1:
                self.step(mark)
            return mark
