# SPDX-License-Identifier: Apache-2.0
"""What can be found to be wrong among ranks, whom it is laid to, and how it is said. No torch.

A verdict is one sentence for the error, and the two operations below it. Links that are cut are
found by what connections say at both of their ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from echelon.launch.desync.connections import StalledConnection
from echelon.launch.desync.fingerprint import Activity, Fingerprint, RankEvidence
from echelon.launch.root_cause import rank_name


class Finding(StrEnum):
    """Name what is wrong."""

    OPERATION = "operation"
    ORDER = "order"
    EXTRA = "extra"
    SHAPE = "shape"
    DTYPE = "dtype"
    APART = "apart"
    RETURNED = "returned"
    RAISED = "raised"
    GONE = "gone"
    UNKNOWN = "unknown"
    LATE = "late"
    LINK = "link"


UNCERTAIN = frozenset({Finding.LATE, Finding.LINK, Finding.UNKNOWN})
"""What time may mend: a rank that still computes, a link that is slow, a rank that is not heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Say who is odd, and which two operations do not meet."""

    finding: Finding
    """What is wrong."""
    odd: tuple[int, ...]
    """The ranks that are odd; all that differ, where none can be judged."""
    others: tuple[int, ...]
    """The ranks that agree with each other; () where none can be judged."""
    its: Fingerprint | None
    """What the first odd rank called, or called last."""
    theirs: Fingerprint | None
    """What the others called, or wait in."""
    kin: tuple[int, ...] = ()
    """Ranks of other groups by which it was judged, where the members are as many on each side."""
    likely: bool = False
    """Whether nobody is judged, and only the first of `odd` left what it did itself before."""
    links: tuple[CutLink, ...] = ()
    """The links that are seen to carry nothing."""

    @property
    def certain(self) -> bool:
        """Return whether no time would mend it."""
        return self.finding not in UNCERTAIN

    @property
    def judged(self) -> bool:
        """Return whether a majority says who is odd."""
        return bool(self.others)


_STACK_LINES = 14  # innermost lines of a stack
_MOST_RANKS = 8  # ranks that are listed one by one
_MOST_LINKS = 4  # links of which both ends are told

_DOES: Mapping[Finding, str] = {
    Finding.OPERATION: "calls {its}, where {others} {call} {theirs}",
    Finding.ORDER: "calls {its} out of order: {others} {call} {theirs} first",
    Finding.EXTRA: "calls {its} once more than others do: {others} {call} {theirs}",
    Finding.SHAPE: "calls {its} with the shape {shape}, and {others} with {other_shape}",
    Finding.DTYPE: "calls {its} with {dtype}, and {others} with {other_dtype}",
    Finding.APART: "waits in {its}, and {others} in {theirs}",
    Finding.RETURNED: "has ended its program, and {others} {wait} for it in {theirs}",
    Finding.RAISED: "has raised, and {others} {wait} for it in {theirs}",
    Finding.GONE: "is gone, and {others} {wait} for it in {theirs}",
    Finding.UNKNOWN: "cannot be heard, and {others} {wait} for it in {theirs}",
    Finding.LATE: "has not come to {theirs}, in which {others} {wait} for it",
    Finding.LINK: "sends nothing that arrives: {others} {wait} in {theirs}, which all have called",
}

_BOTH: Mapping[Finding, str] = {
    Finding.OPERATION: "call different operations, {its} and {theirs}",
    Finding.SHAPE: "call {its} with the shapes {shape} and {other_shape}",
    Finding.DTYPE: "call {its} with {dtype} and {other_dtype}",
    Finding.APART: "wait for one another, in {its} and in {theirs}",
    Finding.LINK: "wait in {theirs}, which all have called: nothing arrives between them",
}

_CUT_OFF = "is cut off from {others}: what is sent between them in {theirs} is not acknowledged"
_NO_LINK = "do not reach each other: what is sent between them in {theirs} is not acknowledged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unacknowledged:
    """Say that `rank` has sent what `others` have not acknowledged."""

    rank: int
    others: tuple[int, ...]
    """The rank at the other end; several where only one of their host can be meant."""
    connection: StalledConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLink:
    """Name the two ends of a link on which nothing arrives, and what shows it."""

    ends: tuple[int, int]
    """The two ranks, in order."""
    facts: tuple[Unacknowledged, ...]
    """At least one, of either end; the longest silence first."""


def cut_links(ranks: Sequence[RankEvidence]) -> list[CutLink]:
    """Return the links between ranks on which nothing is acknowledged, the most silent first.

    Whose end a peer is, ranks say themselves. An end that no rank has told belongs to those that
    cannot be heard, if there are any, and they are of one host.
    """
    owners = {end: one.rank for one in ranks if one.connections for end in one.connections.ends}
    unheard = [one for one in ranks if one.activity is Activity.UNKNOWN and one.connections is None]
    lost = tuple(one.rank for one in unheard) if len({one.host for one in unheard}) == 1 else ()
    found: dict[tuple[int, int], list[Unacknowledged]] = defaultdict(list)
    for one in ranks:
        for connection in () if one.connections is None else one.connections.stalled:
            owner = owners.get(connection.peer)
            others = lost if owner is None else (owner,)
            if not others or one.rank in others:
                continue
            fact = Unacknowledged(rank=one.rank, others=others, connection=connection)
            low, high = sorted((one.rank, others[0]))
            found[low, high].append(fact)
    links = [
        CutLink(ends=ends, facts=tuple(sorted(facts, key=_silence)))
        for ends, facts in found.items()
    ]
    return sorted(links, key=lambda link: (_silence(link.facts[0]), link.ends))


def something_arrives(ranks: Sequence[RankEvidence]) -> bool:
    """Return whether a rank has just got data from another: a link may be slow, and carry yet."""
    ends = {one.rank: {*one.connections.ends} for one in ranks if one.connections}
    return any(
        peer in theirs
        for one in ranks
        if one.connections
        for peer in one.connections.arriving
        for rank, theirs in ends.items()
        if rank != one.rank
    )


def common_end(links: Sequence[CutLink]) -> int | None:
    """Return the rank that is an end of all of several links; None where there is none."""
    if len(links) < 2:
        return None
    shared = set(links[0].ends).intersection(*(link.ends for link in links[1:]))
    return shared.pop() if len(shared) == 1 else None


def _silence(fact: Unacknowledged) -> float:
    return -fact.connection.silent_s


def summary(verdict: Verdict, ranks: Sequence[RankEvidence]) -> str:
    """Return one sentence about the first odd rank, without its name in front."""
    names = {one.rank: rank_name(one.rank, one.label) for one in ranks}
    plural = len(verdict.others) > 1
    its = verdict.its
    theirs = verdict.theirs or (its if verdict.links else None)
    words = {
        "its": told(its),
        "theirs": told(theirs),
        "shape": "" if its is None else str(list(its.shape)),
        "other_shape": "" if theirs is None else str(list(theirs.shape)),
        "dtype": "" if its is None else its.dtype,
        "other_dtype": "" if theirs is None else theirs.dtype,
        "others": _listed(verdict.others, names),
        "call": "call" if plural else "calls",
        "wait": "wait" if plural else "waits",
    }
    odd = next((one for one in ranks if one.rank == verdict.odd[0]), None)
    if verdict.links and verdict.judged:
        return _CUT_OFF.format(**words)
    if verdict.finding is Finding.LATE and odd is not None and odd.place and not odd.call:
        return f"is not waiting: it is at {odd.place}, and {_DOES[Finding.LATE].format(**words)}"
    if not verdict.judged:
        text = (_NO_LINK if verdict.links else _BOTH[verdict.finding]).format(**words)
        more = _listed(verdict.odd[1:], names)
        nobody = "" if verdict.finding is Finding.LINK else ", and nobody says which is odd"
        if verdict.likely:
            nobody = f", and most likely rank {verdict.odd[0]} is odd: it left what it did before"
        return f"and {more} {text}{nobody}"
    text = _DOES[verdict.finding].format(**words)
    if len(verdict.odd) > 1:
        text += f"; so does {_listed(verdict.odd[1:], names)}"
    return text


def detail(verdict: Verdict, ranks: Sequence[RankEvidence], *, stacks: bool = True) -> str:
    """Return the two operations with their places, how it was judged, and the stack of the late."""
    names = {one.rank: rank_name(one.rank, one.label) for one in ranks}
    odd = next((one for one in ranks if one.rank == verdict.odd[0]), None)
    lines: list[str] = []
    if verdict.its is not None:
        last = "called " if verdict.finding in _ENDED else ""
        lines.append(f"  {names.get(verdict.odd[0], '')} {last}{at_length(verdict.its, odd)}")
    elif verdict.finding in _ENDED:
        lines.append(f"  {names.get(verdict.odd[0], '')} has called no operation")
    if verdict.theirs is not None:
        group = _together(verdict, ranks)
        other = next((one for one in ranks if one.rank in group), None)
        lines.append(f"  {_listed(group, names)} {at_length(verdict.theirs, other)}")
    lines += [f"  {one}" for one in _links(verdict, ranks)] or [f"  {_reason(verdict)}"]
    if odd is not None and stacks and verdict.finding is Finding.LATE:
        if odd.call:
            lines.append(f"  it waits in {odd.call}")
        elif odd.place:
            lines.append(f"  it is at {odd.place}")
        lines += odd.stack.rstrip().splitlines()[-_STACK_LINES:]
    return "\n".join(lines)


_ENDED = (Finding.RETURNED, Finding.RAISED, Finding.GONE, Finding.UNKNOWN, Finding.LATE)


def told(one: Fingerprint | None) -> str:
    """Return an operation in a few words: ``all_reduce dp.3``."""
    return "no operation" if one is None else f"{one.kind} {one.name}".strip()


def at_length(one: Fingerprint, rank: RankEvidence | None = None) -> str:
    """Return an operation with its tensor, its group, its place in it, and the line of its call."""
    tensor = f" of {one.dtype} {list(one.shape)}" if one.dtype else ""
    if one.ends is None:
        where = f"call {one.sequence} of ranks {_numbers(one.ranks)}"
    else:
        where = f"message {one.sequence} from rank {one.ends[0]} to {one.ends[1]}"
    axis = f" ({one.axis})" if one.axis else ""
    site = f", at {one.site}" if one.site else ""
    task = f", in {one.task}" if one.task else ""
    if rank is not None and rank.doing and rank.waits_for == one.number:
        task += f" of {rank.doing}" if task else f", in {rank.doing}"
    return f"{told(one)}{tensor}, {where}{axis}{site}{task}"


def _together(verdict: Verdict, ranks: Sequence[RankEvidence]) -> Sequence[int]:
    """Return the other ranks that are in the operation which is told of them."""
    group, theirs = verdict.others or verdict.odd[1:], verdict.theirs
    if not verdict.links or theirs is None:
        return group
    alike = [
        one.rank
        for one in ranks
        if one.rank in group
        and one.waiting is not None
        and (one.waiting.channel, one.waiting.sequence) == (theirs.channel, theirs.sequence)
    ]
    return alike or group[:1]


def _links(verdict: Verdict, ranks: Sequence[RankEvidence]) -> Iterator[str]:
    """Yield what shows that links are cut: the longest silence at each end of each."""
    by_rank = {one.rank: one for one in ranks}

    def place(rank: int) -> str:
        one = by_rank.get(rank)
        if one is None:
            return f"rank {rank}"
        return rank_name(rank, one.label) + (f" on {one.host}" if one.host else "")

    for link in verdict.links[:_MOST_LINKS]:
        for rank in link.ends:
            fact = next((one for one in link.facts if one.rank == rank), None)
            if fact is None:
                continue
            others = ", ".join(place(other) for other in fact.others)
            yield f"{place(rank)} has sent {unacknowledged(fact.connection, others)}"
    if len(verdict.links) > _MOST_LINKS:
        yield f"and {len(verdict.links) - _MOST_LINKS} more links are cut"


def unacknowledged(one: StalledConnection, to: str) -> str:
    """Return what has been sent `to` somebody in vain."""
    packets = "1 packet" if one.packets == 1 else f"{one.packets} packets"
    times = "once" if one.repeats == 1 else f"{one.repeats} times"
    return (
        f"{packets} to {to} and again {times}, from {one.local} to {one.peer}, "
        f"and heard nothing for {one.silent_s:.1f} s"
    )


def _reason(verdict: Verdict) -> str:
    if verdict.finding is Finding.LINK:
        return "every member has called it: the link between them is cut, or very slow"
    if verdict.likely:
        return (
            f"as many ranks do the one as the other, but rank {verdict.odd[0]} did something else "
            "here in each step before, and the others did what they always do"
        )
    if not verdict.judged:
        return "as many ranks do the one as the other: nobody can be judged"
    if verdict.finding in _ENDED:
        return "what a rank that waits for no other has not called is missing"
    if verdict.kin:
        plural = "rank" if len(verdict.kin) == 1 else "ranks"
        named = f"{plural} {_numbers(verdict.kin)}"
        return f"{named}, which made the same calls until then, went on with the latter"
    return f"{len(verdict.others)} agree, {len(verdict.odd)} differ: the fewer are odd"


def _listed(ranks: Sequence[int], names: Mapping[int, str]) -> str:
    if not ranks:
        return "the others"
    if len(ranks) == 1:
        return names.get(ranks[0], f"rank {ranks[0]}")
    return f"ranks {_numbers(ranks)}"


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MOST_RANKS:
        return ", ".join(map(str, ranks))
    return (
        f"{', '.join(map(str, ranks[: _MOST_RANKS - 1]))} and {len(ranks) - _MOST_RANKS + 1} more"
    )
