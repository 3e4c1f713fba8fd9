# SPDX-License-Identifier: Apache-2.0
"""Compare the rings of ranks that no supervisor of ours sees, by way of the launcher's store.

Under torchrun each rank has a watchdog, and they share a store and no folder. One whose rank has
waited for `after_s` asks; all others write what they know of their own ranks into the store, within
a tick of their watchdogs; the one that asked compares. The ring of a process that has ended is
read by a watchdog of the same host. No collective is used: those are what may hang.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.serialize import from_json, to_json
from echelon.launch.desync.findings import Finding, Verdict
from echelon.launch.desync.fingerprint import Activity, RankEvidence
from echelon.launch.desync.ring import FingerprintRing, RingReader, remove_ring
from echelon.launch.desync.verdict import find_mismatch, find_stall
from echelon.launch.desync.watch import KnownRank, evidence_of

if TYPE_CHECKING:
    from echelon.launch.process_group import Store

TOLD = 96
"""How many of its last operations a rank tells: a step of most plans, and less than 100 KB."""
_COLLECT_S = 1.4
_POLL_S = 0.1
_AGAIN_S = 5.0
_SOON_S = 2.0
"""When to ask again those who may only have been too busy to answer."""
_APART_S = 2.0
"""How far apart ranks may have answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlace:
    """Say on which host a ring is, and in which file."""

    host: str
    path: str


class DesyncExchange:
    """Take part in comparisons for one rank, and start them; used by its watchdog alone."""

    def __init__(
        self, store: Store, ring: FingerprintRing, *, rank: int, host: str, after_s: float
    ) -> None:
        """Say where the ring of `rank` is, for when this process cannot be asked any more."""
        self._store, self._rank, self._host = store, rank, host
        self._after_s = after_s
        self._path, self._reader = ring.path, RingReader(ring.path)
        self._answered = 0
        self._asks_after = 0.0
        store.set(f"ring/{rank}", json.dumps(to_json(RingPlace(host=host, path=str(ring.path)))))

    def due_s(self, now: float) -> float | None:
        """Return in how many seconds a comparison is due; None where this rank waits for nobody."""
        number, since = self._reader.wait()
        return max(since + self._after_s, self._asks_after) - now if number else None

    def answer(self, known: Callable[[], KnownRank]) -> None:
        """Tell what is known of this rank, if somebody has asked since it last did.

        Who has just answered has no need to ask itself.
        """
        asked = self._num_asked()
        if asked > self._answered:
            self._answered = asked
            self._asks_after = time.monotonic() + _AGAIN_S
            self._tell(asked, self._own(known))

    def compare(
        self,
        labels: Sequence[str],
        known: Callable[[], KnownRank],
        gone: Callable[[int], Activity | None] = lambda rank: None,
    ) -> tuple[Verdict | None, list[RankEvidence]]:
        """Ask all ranks, and return what their answers show; `gone` says which cannot answer."""
        number = self._answered = self._store.add("desync/asked", 1)
        self._asks_after = time.monotonic() + _AGAIN_S
        own = self._own(known)
        self._tell(number, own)
        waiting = {rank for rank in range(len(labels)) if rank != self._rank}
        found = {self._rank: own}
        until = time.monotonic() + _COLLECT_S
        while waiting and time.monotonic() < until:
            for rank in sorted(waiting):
                key = f"desync/{number}/{rank}"
                if self._store.check([key]):
                    found[rank] = from_json(RankEvidence, json.loads(self._store.get(key)))
                    waiting.discard(rank)
            if waiting and all(gone(rank) is not None for rank in waiting):
                break
            if waiting:
                time.sleep(_POLL_S)
        for rank in waiting:
            activity = gone(rank) or Activity.UNKNOWN
            found[rank] = self._left_behind(rank, labels[rank], activity)
        evidence = [found[rank] for rank in sorted(found)]
        verdict = find_mismatch(evidence) or find_stall(evidence, _APART_S)
        if verdict is not None and verdict.finding is Finding.UNKNOWN:
            self._asks_after = time.monotonic() + _SOON_S
        return verdict, evidence

    def close(self) -> None:
        """Remove the ring of this rank, whose process ends."""
        remove_ring(self._path)

    def own_wait(self) -> RankEvidence:
        """Return what this rank waits in."""
        known = KnownRank(
            rank=self._rank, label="", activity=None, doing="", waiting="", stacks=None
        )
        return evidence_of(known, self._reader, time.monotonic(), most=TOLD)

    def _own(self, known: Callable[[], KnownRank]) -> RankEvidence:
        evidence = evidence_of(known(), self._reader, time.monotonic(), most=TOLD)
        return replace(evidence, host=self._host)

    def _num_asked(self) -> int:
        return self._store.add("desync/asked", 0)

    def _tell(self, number: int, evidence: RankEvidence) -> None:
        self._store.set(f"desync/{number}/{self._rank}", json.dumps(to_json(evidence)))

    def _left_behind(self, rank: int, label: str, activity: Activity) -> RankEvidence:
        """Return what the ring of a rank says that does not answer, if it is on this host."""
        known = KnownRank(
            rank=rank, label=label, activity=activity, doing="", waiting="", stacks=None
        )
        key = f"ring/{rank}"
        if self._store.check([key]):
            place = from_json(RingPlace, json.loads(self._store.get(key)))
            if place.host == self._host:
                with contextlib.suppress(OSError):
                    reader = RingReader(Path(place.path))
                    if activity is Activity.GONE:
                        remove_ring(Path(place.path))
                    try:
                        found = evidence_of(known, reader, time.monotonic(), most=TOLD)
                        return replace(found, host=place.host)
                    finally:
                        reader.close()
            return replace(evidence_of(known, None, time.monotonic()), host=place.host)
        return evidence_of(known, None, time.monotonic())
