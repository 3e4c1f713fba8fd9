# SPDX-License-Identifier: Apache-2.0
"""Find ranks of one host that will never meet: by their rings, and by what stands still.

Rings are compared out of band: the supervisor of the ranks reads the files (`DesyncWatch`). As soon
as a rank has waited for `after_s`, all ranks are asked for their stacks and their rings are
compared. What no time would mend ends the run; a rank that still computes, or a link that carries
nothing, is told once and the run goes on until the step timeout. Operations that differ and yet
end, as sums of other dtypes with as many bytes do, are looked for every `after_s` / 2.

Programs of others leave no rings, and time alone says nothing of a slow one (`MeetingWatch`). A
rank that has returned, waits in a collective or sleeps at one line, while no process of the job
uses a processor, has nothing left to come from: for some seconds of it the job is ended. Where a
rank is still in something else (a lock, a file), four times as long.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from echelon.launch.desync.findings import Finding, Verdict, detail, summary
from echelon.launch.desync.fingerprint import Activity, RankEvidence
from echelon.launch.desync.ring import DEVICE_READ, NOTHING, SLOTS, RingReader, ring_path
from echelon.launch.desync.verdict import find_mismatch, find_stall
from echelon.launch.local.messages import ThreadStacks
from echelon.launch.local.stacks import is_user_file
from echelon.launch.root_cause import FaultKind, RankFault, rank_name

_ANSWER_S = 1.0
"""How long ranks may take to tell their stacks; one that is held by native code never does."""
_GLANCE = 160
"""Operations that are compared while nobody waits: some milliseconds for eight ranks."""
_ASK_AGAIN_S = 5.0
"""How old stacks may become while some rank still waits."""
_TIMED = frozenset({FaultKind.STUCK, FaultKind.TIMED_OUT})
_MAY_BE_ECHO = _TIMED | {FaultKind.ABORTED, FaultKind.CONNECTION, FaultKind.NEVER_MET}
"""What calls that do not meet may end in: Gloo ends a process that gets too many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRank:
    """Say what a supervisor knows of a rank at one time, beside its ring."""

    rank: int
    label: str = ""
    pid: int = 0
    activity: Activity | None = None
    """What it does, where it no longer works; None where its ring tells."""
    count: int = 0
    """How often its heartbeat has said something new."""
    doing: str = ""
    waiting: str = ""
    """What it has said that it waits for, in an operation or outside."""
    stacks: ThreadStacks | None = None

    @property
    def name(self) -> str:
        """Return how the rank is called."""
        return rank_name(self.rank, self.label)

    @property
    def ended(self) -> bool:
        """Return whether its program has ended."""
        return self.activity in (Activity.RETURNED, Activity.GONE)

    @property
    def call(self) -> str:
        """Return the collective that it waits in."""
        return "" if self.ended or self.stacks is None else self.stacks.call


class RingsOfRanks:
    """Open the rings of ranks as they appear, and read them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read from `paths`, one for each rank."""
        self._paths = paths
        self._readers: dict[int, RingReader] = {}
        self._removed = False

    def close(self) -> None:
        """Close the files, and remove them: what is known of them has been told."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._remove()

    def longest_wait_s(self, now: float) -> float:
        """Return for how long a rank has waited in an operation, or for its device.

        Files of which all are open need no name any more: nothing is left if this process is
        killed.
        """
        waits = [reader.wait() for rank in range(len(self._paths)) if (reader := self.of(rank))]
        if len(self._readers) == len(self._paths):
            self._remove()
        return max((now - since for number, since in waits if number), default=0.0)

    def _remove(self) -> None:
        if not self._removed:
            self._removed = True
            for path in self._paths:
                path.unlink(missing_ok=True)

    def of(self, rank: int) -> RingReader | None:
        """Return the ring of a rank, if it has one yet."""
        if rank not in self._readers:
            with contextlib.suppress(OSError):
                self._readers[rank] = RingReader(self._paths[rank])
        return self._readers.get(rank)


def evidence_of(
    status: KnownRank, reader: RingReader | None, now: float, *, most: int = SLOTS
) -> RankEvidence:
    """Return what is known of a rank, its ring (at most so many operations) and its status."""
    ring = NOTHING if reader is None else reader.read(most)
    waits_for, until, stacks = ring.waits_for, None, status.stacks
    if waits_for == DEVICE_READ:
        waits_for = until = None if stacks is None else stacks.unfinished
    activity = status.activity
    if activity is None:
        outside = status.waiting or (stacks.waiting if stacks is not None else "")
        activity = Activity.WAITS if waits_for or outside else Activity.RUNS
    return RankEvidence(
        rank=status.rank,
        label=status.label,
        activity=activity,
        fingerprints=ring.fingerprints,
        waits_for=waits_for,
        waited_s=now - ring.waits_since if ring.waits_for else 0.0,
        awaits=ring.awaits,
        counts_until=until,
        doing=ring.doing or status.doing,
        call="" if waits_for or stacks is None else stacks.waiting and stacks.call,
        place="" if stacks is None else stacks.place,
        # The stack of the main thread comes first.
        stack="" if stacks is None else stacks.text.partition("\nthread ")[0],
        connections=None if stacks is None else stacks.connections,
    )


def same(one: Verdict, other: Verdict) -> bool:
    """Return whether two verdicts blame the same ranks for the same, at the same place."""
    numbers = [None if each.theirs is None else each.theirs.number for each in (one, other)]
    return (one.finding, one.odd, numbers[0]) == (other.finding, other.odd, numbers[1])


def fault_of(verdict: Verdict, ranks: Sequence[RankEvidence]) -> RankFault:
    """Return a verdict as the fault of the first odd rank."""
    kind = FaultKind.LINK if verdict.finding is Finding.LINK else FaultKind.NEVER_MET
    return RankFault(
        rank=verdict.odd[0],
        kind=kind,
        at=time.monotonic(),
        summary=summary(verdict, ranks),
        detail=detail(verdict, ranks),
    )


def note_of(fault: RankFault, label: str, step_s: float) -> str:
    """Return what is said of a fault that time may mend."""
    who = rank_name(fault.rank, label)
    until = f"  no error yet: the run goes on until a step has taken {step_s:g} s"
    return f"note: {who}: {fault.summary}\n{fault.detail}\n{until}"


class DesyncWatch:
    """Watch the ranks of one job by their rings."""

    def __init__(self, folder: Path, job: int, world_size: int, after_s: float) -> None:
        """Read the rings of `job` in `folder` once a rank has waited for `after_s`."""
        self._rings = RingsOfRanks([ring_path(folder, job, rank) for rank in range(world_size)])
        self._after_s = after_s
        self._asked_at: float | None = None
        self._compared_at = time.monotonic()
        self._before: Verdict | None = None
        self._told: set[tuple[Finding, tuple[int, ...], int]] = set()

    def close(self) -> None:
        """Close and remove the rings."""
        self._rings.close()

    def wants_stacks(self, now: float) -> bool:
        """Return whether some rank has waited so long that all must now say where they are."""
        if self._rings.longest_wait_s(now) < self._after_s:
            self._asked_at = self._before = None
            return False
        if self._asked_at is not None and now - self._asked_at < _ASK_AGAIN_S:
            return False
        self._asked_at = now
        return True

    def look(self, ranks: Sequence[KnownRank]) -> tuple[RankFault, bool] | None:
        """Return a fault that is new, and whether it is certain; None where there is none.

        What follows from waits counts when it is seen twice: rings are read one after the other.
        """
        now = time.monotonic()
        overdue = self._asked_at is not None and (
            now - self._asked_at > _ANSWER_S
            or all(one.stacks is not None or one.activity is not None for one in ranks)
        )
        if not overdue and now - self._compared_at < self._after_s / 2:
            return None
        self._compared_at = now
        evidence = self.evidence(ranks, SLOTS if overdue else _GLANCE)
        verdict = find_mismatch(evidence)
        if verdict is not None:
            return fault_of(verdict, evidence), True
        verdict = find_stall(evidence) if overdue else None
        before, self._before = self._before, verdict
        if verdict is None or before is None or not same(verdict, before):
            return None
        key = (verdict.finding, verdict.odd, verdict.theirs.number if verdict.theirs else 0)
        if not verdict.certain and key in self._told:
            return None
        self._told.add(key)
        return fault_of(verdict, evidence), verdict.certain

    def explained(self, fault: RankFault, ranks: Sequence[KnownRank]) -> RankFault:
        """Return a fault with what fingerprints say of it, or what they show to be its cause."""
        if fault.kind in (FaultKind.NEVER_MET, FaultKind.LINK) and fault.detail:
            return fault
        evidence = self.evidence(ranks)
        mismatch, stall = find_mismatch(evidence), find_stall(evidence, moving_s=0.0)
        if mismatch is not None and fault.kind in _MAY_BE_ECHO:
            return replace(fault_of(mismatch, evidence), at=fault.at)
        if stall is None:
            return fault
        if fault.kind is FaultKind.CONNECTION and stall.finding is Finding.LINK:
            found = fault_of(stall, evidence)
            return replace(found, at=fault.at, detail=f"{found.detail}\n{fault.summary}")
        if fault.kind in _TIMED and stall.finding is Finding.LINK:
            return replace(fault_of(stall, evidence), at=fault.at)
        if fault.kind in _TIMED and stall.judged and stall.odd[0] != fault.rank:
            return replace(fault_of(stall, evidence), at=fault.at, kind=fault.kind)
        if fault.rank not in stall.odd and fault.kind not in _TIMED:
            return fault
        more = detail(stall, evidence, stacks=not fault.detail)
        return replace(fault, detail=f"{fault.detail.rstrip()}\n{more}".lstrip("\n"))

    def evidence(self, ranks: Sequence[KnownRank], most: int = SLOTS) -> list[RankEvidence]:
        """Return what is known of all ranks now, with so many of their last operations at most."""
        now = time.monotonic()
        return [evidence_of(one, self._rings.of(one.rank), now, most=most) for one in ranks]


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
