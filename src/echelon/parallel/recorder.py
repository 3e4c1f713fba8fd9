"""What a rank writes down while it runs: one Event per collective, message and action.

On a GPU, actions have the device's times (`device_clock.py`) and are written when the step has
ended (`settle`). Collectives have the host's times there: when they were launched and awaited.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from echelon.core.event import Event, EventSink
from echelon.parallel.device_clock import DeviceClock


class WaitMarks(Protocol):
    """Whoever watches the rank: told when it starts and stops to wait for others."""

    def enter(self, collective: str, turn: int | None = None) -> None:
        """Learn that the rank now waits in `collective`, at its `turn` of the pipeline's order."""
        ...

    def leave(self) -> None:
        """Learn that the wait is over."""
        ...


class NoWaitMarks:
    """Watch nothing."""

    def enter(self, collective: str, turn: int | None = None) -> None:
        """Ignore the start of a wait."""

    def leave(self) -> None:
        """Ignore the end of a wait."""


@dataclass(frozen=True, slots=True)
class _Marked:
    """An action, or a part of one, between two marks of a device."""

    kind: str
    name: str
    stage: int | None
    microbatch: int | None
    start: object
    end: object


class Recorder:
    """Stamp events with this rank, its clock, and the stage and microbatch now at work."""

    def __init__(
        self,
        rank: int,
        sink: EventSink,
        waits: WaitMarks | None = None,
        clock: DeviceClock | None = None,
    ) -> None:
        """Send the events of `rank` to `sink` and its waits to `waits`; the clock starts now.

        `clock` tells when the device ran an action, where that is not when the host did.
        """
        self.rank, self.sink = rank, sink
        self._clock = clock
        self._marked: list[_Marked] = []
        self._waits = waits or NoWaitMarks()
        self.waited_s = 0.0
        self.stage: int | None = None
        self.microbatch: int | None = None
        self._task = ""
        self._turn: int | None = None
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since this recorder was made."""
        return time.perf_counter() - self._zero

    def at(self, task: str, turn: int | None) -> None:
        """Say what this rank runs or is about to run, and its place in an order of all ranks' work.

        Where every rank waits, the one whose turn comes first waits for what was never sent.
        """
        self._task, self._turn = task, turn

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Mark what happens inside as a wait for other ranks, and add up how long it took.

        The rank that waits least is the one that the others wait for.
        """
        start = self.now()
        self._waits.enter(f"{collective} at {self._task}" if self._task else collective, self._turn)
        try:
            yield
        finally:
            self._waits.leave()
            self.waited_s += self.now() - start

    def record(
        self,
        kind: str,
        name: str,
        *,
        start: float,
        axis: str = "",
        num_bytes: int = 0,
        microbatch: int | None = None,
    ) -> None:
        """Write one event that began at `start` and ends now."""
        self.sink.record(
            Event(
                kind=kind,
                name=name,
                axis=axis,
                stage=self.stage,
                microbatch=self.microbatch if microbatch is None else microbatch,
                bytes=num_bytes,
                start=start,
                end=self.now(),
                rank=self.rank,
            )
        )

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
        start = self.now()
        mark = self._clock.mark() if self._clock is not None else None
        try:
            yield
        finally:
            if self._clock is None:
                self.record(kind, name, start=start)
            else:
                place = (self.stage, self.microbatch)
                self._marked.append(_Marked(kind, name, *place, mark, self._clock.mark()))

    def settle(self) -> None:
        """Write down the actions whose times only the device knows; waits until it has run them."""
        marked, self._marked = self._marked, []
        for one in marked:
            assert self._clock is not None
            self.sink.record(
                Event(
                    kind=one.kind,
                    name=one.name,
                    axis="",
                    stage=one.stage,
                    microbatch=one.microbatch,
                    bytes=0,
                    start=self._clock.at(one.start) - self._zero,
                    end=self._clock.at(one.end) - self._zero,
                    rank=self.rank,
                )
            )
