# SPDX-License-Identifier: Apache-2.0
"""Say what a rank knows alone, while its watchdog waits for a store that does not answer.

Where the link to the host of the launcher's store is cut, nobody can be asked any more: a rank
still knows in which operation it waits, and which other ends acknowledge nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from echelon.launch.desync.connections import StalledConnection, own_connections
from echelon.launch.desync.ring import RingReader
from echelon.launch.desync.watch import KnownRank, evidence_of, note_of
from echelon.launch.desync.wording import at_length, told, unacknowledged
from echelon.launch.local.messages import Limits
from echelon.launch.local.output import say_if_possible
from echelon.launch.root_cause import FaultKind, RankFailure, RankFault, rank_name

_LOOK_S = 0.5
_DEAF_S = 3.0
"""How long a look of the watchdog at the store may take: it asks others for answers, too."""
_MOST = 4  # connections that are told


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
        self._known = KnownRank(
            rank=rank, label=label, activity=None, doing="", waiting="", stacks=None
        )
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
