"""Say what a rank knows alone, while its watchdog waits for a store that does not answer.

Where the link to the host of the launcher's store is cut, nobody can be asked any more: a rank
still knows in which operation it waits, and which other ends acknowledge nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from echelon.launch.desync.connections import own_connections
from echelon.launch.desync.ring import RingReader
from echelon.launch.desync.watch import KnownRank, evidence_of
from echelon.launch.desync.wording import at_length, told, unacknowledged
from echelon.launch.local.output import say_if_possible
from echelon.launch.root_cause import rank_name

_LOOK_S = 0.5
_DEAF_S = 3.0
"""How long a look of the watchdog at the store may take: it asks others for answers, too."""
_MOST = 4


class RankAlone(threading.Thread):
    """Watch whether the watchdog of this rank still gets answers."""

    def __init__(
        self,
        ring: Path,
        *,
        rank: int,
        label: str,
        after_s: float,
        ticked_at: Callable[[], float],
    ) -> None:
        """Read from `ring`; `ticked_at` says when the watchdog last began a look at the store."""
        super().__init__(name="rank alone", daemon=True)
        self._reader = RingReader(ring)
        self._known = KnownRank(
            rank=rank, label=label, activity=None, doing="", waiting="", stacks=None
        )
        self._after_s, self._ticked_at = after_s, ticked_at
        self._told: int | None = None

    def run(self) -> None:
        """Look twice a second, and say what is new."""
        while True:
            time.sleep(_LOOK_S)
            note = self.look(time.monotonic())
            if note is not None:
                say_if_possible(note, sys.stderr)

    def look(self, now: float) -> str | None:
        """Return what is to be said, once for each wait; None where others can be asked."""
        number, since = self._reader.wait()
        if not number or now - since < self._after_s or now - self._ticked_at() < _DEAF_S:
            return None
        connections = own_connections()
        if self._told == number or connections is None or not connections.stalled:
            return None
        self._told = number
        one = evidence_of(self._known, self._reader, now)
        who, call = rank_name(one.rank, one.label), one.waiting
        hosts = sorted({found.peer.rpartition(":")[0] for found in connections.stalled})
        lines = [
            f"note: {who}: waits in {told(call)}, and nothing comes from {', '.join(hosts)}, "
            "nor from the run's store"
        ]
        if call is not None:
            lines.append(f"  {who} {at_length(call)}")
        lines += [
            f"  {who} has sent {unacknowledged(found, found.peer)}"
            for found in connections.stalled[:_MOST]
        ]
        return "\n".join(lines)
