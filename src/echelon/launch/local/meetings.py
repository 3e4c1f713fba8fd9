# SPDX-License-Identifier: Apache-2.0
"""Find ranks that will never meet: all wait, none computes; or one got bytes of another call.

Time alone says nothing of a slow program. A rank that has returned, waits in a collective or sleeps
at one line, while no process of the job uses a processor, has nothing left to come from: for some
seconds of it the job is ended. Where a rank is still in something else (a lock, a file), four times
as long.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from echelon.launch.local.desync_watch import KnownRank
from echelon.launch.local.stacks import is_user_file
from echelon.launch.root_cause import FaultKind, RankFault

_IDLE_SHARE = 0.05
"""Processor seconds per second that a waiting rank may use: its heartbeats, and polls."""
_IDLE_S = 0.2
"""Processor seconds that it may use beside: the reading of its own stack."""
_OTHER_WAITS = 4
"""How many times as long a rank may be still in something that is no wait for ranks."""
_WRONG_SIZE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_TORCH_ERROR = re.compile(r": \w+Error: .*")
_DUMPED_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class MeetingWatch:
    """Watch whether anything still moves among the ranks of one job."""

    def __init__(self, still_s: float) -> None:
        """`still_s` is how long all ranks may wait while none computes."""
        self._still_s = still_s
        self._since = time.monotonic()
        self._seen: object = None
        self._used: dict[int, float] = {}

    def look(self, ranks: Sequence[KnownRank]) -> RankFault | None:
        """Return the fault of the rank that does not come, once all have been still for long."""
        now = time.monotonic()
        seen = [(one.ended, one.count, one.call, _place(one)) for one in ranks]
        used = {one.rank: processor_seconds(one.pid) for one in ranks if not one.ended}
        allowed = _IDLE_S + _IDLE_SHARE * (now - self._since)
        computes = any(used[rank] - self._used.get(rank, 0.0) > allowed for rank in used)
        if seen != self._seen or computes:
            self._seen, self._since, self._used = seen, now, used
            return None
        waits = [one for one in ranks if one.call]
        if not waits:
            return None
        known = all(
            one.ended or one.call or (one.stacks is not None and one.stacks.asleep) for one in ranks
        )
        if now - self._since < self._still_s * (1 if known else _OTHER_WAITS):
            return None
        return self._fault(ranks, now)

    def _fault(self, ranks: Sequence[KnownRank], now: float) -> RankFault:
        odd = odd_rank(ranks)
        others = [one for one in ranks if one.call and one is not odd]
        still = f"nothing has moved for {now - self._since:.0f} s"
        if not odd.call:
            summary = f"does not enter {others[0].call}, in which {others[0].name} waits"
        elif not others:
            summary = f"waits in {odd.call}, and there is no other rank"
        elif others[0].call != odd.call:
            summary = f"waits in {odd.call}, and {others[0].name} in {others[0].call}"
        else:
            summary = f"waits in {odd.call}, and so does every other rank"
        detail = "\n".join(f"  {_sentence(one)}" for one in ranks)
        return RankFault(
            rank=odd.rank,
            kind=FaultKind.NEVER_MET,
            at=now,
            summary=f"{summary}; {still}",
            detail=detail,
        )


def odd_rank(ranks: Sequence[KnownRank]) -> KnownRank:
    """Return the rank that the others wait for: one that waits for nobody, or the least common."""
    away = [one for one in ranks if not one.call]
    if away:
        # One that has returned may have had nothing to do with it; one that is at work has.
        return min(away, key=lambda one: (one.ended, one.count))
    common = Counter((one.call, _place(one)) for one in ranks)
    return min(ranks, key=lambda one: (common[one.call, _place(one)], one.count, -one.rank))


def wrong_size(log_tail: str) -> str | None:
    """Return what a rank died of that got bytes of another collective, by the end of its log."""
    sizes = _WRONG_SIZE.search(log_tail)
    if sizes is None:
        return None
    frames = [one for one in _DUMPED_FRAME.findall(log_tail) if is_user_file(one[0])]
    place = f" at {Path(frames[0][0]).name}:{frames[0][1]}" if frames else ""
    return (
        f"a collective{place} got {sizes[1]} bytes where it takes {sizes[2]}: another rank is in "
        "another collective, or has a tensor of another size"
    )


def where_lost(fault: RankFault) -> str:
    """Return where a rank was when it lost the connection to one that died, by its own error."""
    told = fault.error.problems[0].message if fault.error is not None else fault.summary
    return _TORCH_ERROR.sub("", told)


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and those that it started have used."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for one in family:
        try:
            times = one.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += times.user + times.system
    return total


def _sentence(one: KnownRank) -> str:
    """Return what a rank does."""
    step = f" in {one.doing}" if one.doing else ""
    if one.ended:
        return f"{one.name} has ended its program"
    place = f", at {one.stacks.place}" if one.stacks and one.stacks.place else ""
    if one.call:
        return f"{one.name} waits in {one.call}{step}{place}"
    asleep = one.stacks is not None and one.stacks.asleep
    return f"{one.name} {'sleeps' if asleep else 'does nothing'}{step}{place}"


def _place(one: KnownRank) -> str:
    return one.stacks.place if one.stacks is not None and not one.ended else ""
