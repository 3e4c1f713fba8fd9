# SPDX-License-Identifier: Apache-2.0
"""Compare the rings of ranks that no supervisor of ours sees, by way of the launcher's store.

Under torchrun each rank has a watchdog, and they share a store and no folder. One whose rank has
waited for `after_s` asks; all others write what they know of their own ranks into the store, within
a tick of their watchdogs; the one that asked compares. The ring of a process that has ended is
read by a watchdog of the same host. No collective is used: those are what may hang.

Where the link to the host of the launcher's store is cut, nobody can be asked any more: a rank
still knows in which operation it waits, and which other ends acknowledge nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.serialize import from_json, to_json
from echelon.launch.desync.connections import StalledConnection, own_connections
from echelon.launch.desync.findings import Finding, Verdict, at_length, told, unacknowledged
from echelon.launch.desync.fingerprint import Activity, RankEvidence
from echelon.launch.desync.ring import FingerprintRing, RingReader, remove_ring
from echelon.launch.desync.verdict import find_mismatch, find_stall
from echelon.launch.local.desync_watch import KnownRank, evidence_of, note_of
from echelon.launch.local.messages import Limits
from echelon.launch.local.output import say_if_possible
from echelon.launch.root_cause import FaultKind, RankFailure, RankFault, rank_name

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

_LOOK_S = 0.5
_DEAF_S = 3.0
"""How long a look of the watchdog at the store may take: it asks others for answers, too."""
_MOST = 4  # connections that are told


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
        asked = self._store.add("desync/asked", 0)
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
        known = KnownRank(rank=self._rank)
        return evidence_of(known, self._reader, time.monotonic(), most=TOLD)

    def _own(self, known: Callable[[], KnownRank]) -> RankEvidence:
        evidence = evidence_of(known(), self._reader, time.monotonic(), most=TOLD)
        return replace(evidence, host=self._host)

    def _tell(self, number: int, evidence: RankEvidence) -> None:
        self._store.set(f"desync/{number}/{self._rank}", json.dumps(to_json(evidence)))

    def _left_behind(self, rank: int, label: str, activity: Activity) -> RankEvidence:
        """Return what the ring of a rank says that does not answer, if it is on this host."""
        known = KnownRank(rank=rank, label=label, activity=activity)
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


class RankAlone(threading.Thread):
    """Watch whether the watchdog of this rank still gets answers."""

    def __init__(
        self,
        ring: Path,
        *,
        rank: int,
        label: str,
        limits: Limits,
        ticked_at: Callable[[], float],
        end: Callable[[str], None],
    ) -> None:
        """Read from `ring`; `ticked_at` says when the watchdog last began a look at the store.

        `end` ends this process with a message, after a wait of `step_s`: nobody else would.
        """
        super().__init__(name="rank alone", daemon=True)
        self._reader = RingReader(ring)
        self._known = KnownRank(rank=rank, label=label)
        self._limits, self._ticked_at, self._end = limits, ticked_at, end
        self._told: int | None = None

    def run(self) -> None:
        """Look twice a second; say what is new, and end when a wait is too long."""
        while True:
            time.sleep(_LOOK_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Say what this rank waits in, once, if nobody can be asked; end it after `step_s`."""
        number, since = self._reader.wait()
        after_s, step_s = self._limits.desync_s, self._limits.step_s
        if not number or after_s is None or now - since < after_s:
            return
        late = now - since > step_s
        if now - self._ticked_at() < _DEAF_S or (self._told == number and not late):
            return
        connections = own_connections()
        if connections is None or not connections.stalled:
            return
        self._told = number
        fault = self._fault(connections.stalled, now)
        if late:
            self._end(str(RankFailure(fault, self._known.label)))
        else:
            say_if_possible(note_of(fault, self._known.label, step_s), sys.stderr)

    def _fault(self, stalled: Sequence[StalledConnection], now: float) -> RankFault:
        one = evidence_of(self._known, self._reader, now)
        who, call = rank_name(one.rank, one.label), one.waiting
        hosts = sorted({found.peer.rpartition(":")[0] for found in stalled})
        sent = [f"{who} has sent {unacknowledged(found, found.peer)}" for found in stalled[:_MOST]]
        lines = [] if call is None else [f"{who} {at_length(call)}"]
        return RankFault(
            rank=one.rank,
            kind=FaultKind.LINK,
            at=now,
            summary=(
                f"waits in {told(call)}, and nothing comes from {', '.join(hosts)}, nor from the "
                "run's store"
            ),
            detail="\n".join(f"  {line}" for line in (*lines, *sent)),
        )
