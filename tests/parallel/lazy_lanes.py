"""Copies and computation in any order that their marks allow: a GPU that dawdles where it may."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from threading import RLock

import torch

from echelon.parallel.offload.lanes import Copy, Lane, Mark


@dataclass(slots=True, eq=False)
class LazyMark:
    """Hold one thing to do, and what must be done before."""

    lanes: LazyLanes
    lane: str
    do: Callable[[], object]
    after: list[LazyMark]
    done: bool = False

    def synchronize(self) -> None:
        """Do what is left up to here."""
        with self.lanes.lock:
            while not self.done:
                self.lanes.step(self)


@dataclass(slots=True)
class LazyLanes:
    """Do nothing until somebody waits, then as little as must be, and now and then more."""

    seed: int
    lock: RLock = field(default_factory=RLock)
    lanes: dict[str, list[LazyMark]] = field(default_factory=dict)
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        """Start the dice."""
        self.random = Random(self.seed)

    def compute(self, do: Callable[[], object], after: Sequence[LazyMark] = ()) -> LazyMark:
        """Give the device something to compute."""
        return self._push("compute", do, after)

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Mark]) -> Mark:
        """Give a lane something to copy."""
        held = list(copies)
        marks = [mark for mark in after if isinstance(mark, LazyMark)]
        return self._push(lane, lambda: [target.copy_(source) for target, source in held], marks)

    def mark(self) -> Mark:
        """Mark the end of the computation so far."""
        return self._push("compute", lambda: None, ())

    def hold(self, mark: Mark) -> None:
        """Let the computation wait."""
        assert isinstance(mark, LazyMark)
        self._push("compute", lambda: None, [mark])

    def share(self, tensor: torch.Tensor) -> None:
        """Keep memory from being used again while something is to be done with it: all is held."""

    def step(self, wanted: LazyMark) -> None:
        """Do one thing: of another lane at random, else what `wanted` needs first."""
        ready = [
            lane[0] for lane in self.lanes.values() if lane and all(m.done for m in lane[0].after)
        ]
        chosen = self.random.choice(ready) if self.random.random() < 0.3 else self._first(wanted)
        chosen.do()
        chosen.done = True
        self.lanes[chosen.lane].remove(chosen)

    def _first(self, wanted: LazyMark) -> LazyMark:
        head = self.lanes[wanted.lane][0]
        missing = [mark for mark in head.after if not mark.done]
        return self._first(missing[0]) if missing else head

    def _push(self, lane: str, do: Callable[[], object], after: Sequence[LazyMark]) -> LazyMark:
        with self.lock:
            mark = LazyMark(self, lane, do, list(after))
            self.lanes.setdefault(lane, []).append(mark)
            if self.random.random() < 0.1:
                self.step(mark)
            return mark
