# SPDX-License-Identifier: Apache-2.0
"""What a target knows about its rank, and what it tells those who watch it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from echelon.launch.desync.ring import FingerprintRing


UnfinishedWait = tuple[str, int | None, int]
"""An operation with other ranks that has not ended, its turn in an order of all work, and the
number of its fingerprint (0: it has none)."""


COMPILING = "compiling kernels"
"""What a rank is at while PyTorch's compiler works: no time limit of a job counts that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRank:
    """Say that a rank was lost without which the run goes on."""

    rank: int
    """Which one."""
    attempt: int
    """How often it had been started again before."""
    cause: str
    """How it was lost, in words."""
    returns: bool
    """Whether it is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Say which process group a rank joins, and its place there."""

    name: str
    """What it is called in the store."""
    rank: int
    """Which of its ranks this one is."""
    world_size: int
    """How many it has."""


class RankProgress:
    """Say how far the main thread of a rank is; read by a thread, so every write is one store.

    `mark` at each step (and at anything long: a checkpoint, a validation), `enter` and `leave`
    around each wait for other ranks: a rank that does not move and does not wait is stuck.
    `answer_stop` once a request to stop gets a result: an earlier request just ends the run.
    A GPU waits for other ranks while the host runs on, so `read` marks where the host reads a value
    of the device: that is a wait for whatever operation the device has not come past.
    """

    __slots__ = ("_stop", "_wait", "announce", "attempt", "count", "doing", "lost", "ring")

    def __init__(self) -> None:
        """Start at nothing done."""
        self._stop = threading.Event()
        self.announce: Callable[[], object] = lambda: None
        # Reports to the launcher of this rank that a request to stop gets a result.
        self.ring: FingerprintRing | None
        # A thread sets it with each job, and appends to it.
        self.lost: list[LostRank] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but who is lost and a request to stop: a new job begins."""
        self.ring = None
        self.attempt = 0
        self.count = 0
        self.doing = ""
        self._wait: tuple[str, int | None, Callable[[], UnfinishedWait | None] | None]
        self._wait = ("", None, None)

    @property
    def waiting(self) -> str:
        """Return what this rank waits for; "" where it does not, or only for its own device."""
        return self._told()[0]

    @property
    def turn(self) -> int | None:
        """Return the place of what it waits for in an order in which all work can be done."""
        return self._told()[1]

    @property
    def unfinished(self) -> int | None:
        """Return the fingerprint of the operation that this rank's device has not come past.

        None where the host waits in operations itself, or reads nothing of the device.
        """
        return self._told()[2] or None

    def mark(self, doing: str) -> None:
        """Say that something new was begun."""
        self.doing = doing
        self.count += 1
        if self.ring is not None:
            self.ring.mark(doing)

    def enter(self, collective: str, turn: int | None = None) -> None:
        """Say that this rank now waits for others in `collective`.

        `turn` is the place of what it waits to do in an order in which all ranks' work can be done.
        """
        self._wait = (collective, turn, None)
        self.count += 1

    def read(self, what: str, unfinished: Callable[[], UnfinishedWait | None]) -> None:
        """Say that the host now waits for the device, to read `what`.

        `unfinished` tells, to the thread that asks, for which operation with other ranks the device
        waits; None where it has come past all of them.
        """
        self._wait = (what, None, unfinished)
        self.count += 1

    def leave(self) -> None:
        """Say that the wait is over."""
        self._wait = ("", None, None)

    def _told(self) -> UnfinishedWait:
        what, turn, unfinished = self._wait
        if unfinished is None:
            return what, turn, 0
        found = unfinished()
        if found is None:
            return "", None, 0
        operation, turn, number = found
        return f"{operation} (the host reads {what})", turn, number

    @contextmanager
    def waits_for(self, collective: str) -> Iterator[None]:
        """Mark the wait for others in `collective`, whatever ends it."""
        self.enter(collective)
        try:
            yield
        finally:
            self.leave()

    def answer_stop(self) -> None:
        """Announce that from now on a request to stop gets a result."""
        self.announce()

    def request_stop(self) -> None:
        """Ask for a stop at the next step boundary."""
        self._stop.set()

    def clear_stop(self) -> None:
        """Forget a request to stop: it was for another job."""
        self._stop.clear()

    def stop_requested(self) -> bool:
        """Return whether someone asked this rank to stop."""
        return self._stop.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Hold what a target needs to know of its place; the process group is already there.

    `store` is shared by the ranks of this job only. `label` says where the rank sits in the mesh.
    Loops over large tensors take `pieces`.
    One that was started again (`attempt`) is alone in its process group.
    """

    rank: int
    world_size: int
    device: torch.device
    store: Store
    progress: RankProgress
    label: str = ""
    pieces: PieceSizes = TRAINING_PIECES

    @property
    def attempt(self) -> int:
        """Return how often this rank was started again."""
        return self.progress.attempt

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to stop: others may not know yet, so agree first."""
        return self.progress.stop_requested()
