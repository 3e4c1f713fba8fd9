"""What a target knows about its rank, and what it tells those who watch it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store


class RankProgress:
    """Say how far the main thread of a rank is; read by a thread, so every write is one store.

    `mark` at each step (and at anything long: a checkpoint, a validation), `enter` and `leave`
    around each wait for other ranks: a rank that does not move and does not wait is stuck.
    """

    __slots__ = ("_stop", "count", "doing", "turn", "waiting")

    def __init__(self) -> None:
        """Start at nothing done."""
        self._stop = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new job begins."""
        self.count = 0
        self.doing = ""
        self.waiting = ""
        self.turn: int | None = None
        self._stop.clear()

    def mark(self, doing: str) -> None:
        """Say that something new was begun."""
        self.doing = doing
        self.count += 1

    def enter(self, collective: str, turn: int | None = None) -> None:
        """Say that this rank now waits for others in `collective`.

        `turn` is the place of what it waits to do in an order in which all ranks' work can be done.
        """
        self.turn = turn
        self.waiting = collective
        self.count += 1

    def leave(self) -> None:
        """Say that the wait is over."""
        self.waiting = ""
        self.turn = None

    @contextmanager
    def waits_for(self, collective: str) -> Iterator[None]:
        """Mark the wait for others in `collective`, whatever ends it."""
        self.enter(collective)
        try:
            yield
        finally:
            self.leave()

    def request_stop(self) -> None:
        """Ask for a stop at the next step boundary."""
        self._stop.set()

    def stop_requested(self) -> bool:
        """Return whether someone asked this rank to stop."""
        return self._stop.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Hold what a target needs to know of its place; the process group is already there.

    `store` is shared by the ranks of this job only. `label` says where the rank sits in the mesh.
    """

    rank: int
    world_size: int
    device: torch.device
    store: Store
    progress: RankProgress
    label: str = ""

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to stop: others may not know yet, so agree first."""
        return self.progress.stop_requested()
