# SPDX-License-Identifier: Apache-2.0
"""Decide from the fingerprints of ranks which of them is odd. Evidence in, one verdict out.

No processes, no files and no torch here. First what ranks called is compared: operation n of a
group must be the same on all members. Where all of that agrees, what they wait for is followed: a
rank waits for the members that have not called the same operation, and these may wait for others.

Who is odd: the members that differ from what strictly more of them called. Where no call has more,
as in a group of two, ranks of other groups that made the same calls until then vote, too: ranks
that differ in nothing but their place run one program, so operation n of one is operation n of the
other, over a group of the same axis. Where they say nothing either, all that differ are named and
none is judged; first the one that did something else than it did itself before, if there is exactly
one.

What connections say counts most: packets that the other end does not acknowledge. Where they say
nothing, as of transports that are no TCP, it is known of some operations for whose message a rank
waits, and of others it is not.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from echelon.launch.desync.findings import (
    Finding,
    Verdict,
    common_end,
    cut_links,
    something_arrives,
)
from echelon.launch.desync.fingerprint import (
    Activity,
    Channel,
    Content,
    Fingerprint,
    RankEvidence,
    partners,
)

MOVING_S = 0.3
"""How far apart the rings of one host are read, at most."""


_ENDED: Mapping[Activity, Finding] = {
    Activity.RAISED: Finding.RAISED,
    Activity.GONE: Finding.GONE,
    Activity.RETURNED: Finding.RETURNED,
    Activity.UNKNOWN: Finding.UNKNOWN,
    Activity.RUNS: Finding.LATE,
    Activity.WAITS: Finding.LATE,
}
"""What a rank that waits in no operation is found to be; what explains most comes first."""


def decide(ranks: Sequence[RankEvidence]) -> Verdict | None:
    """Return what is wrong among ranks of which some wait; None where nothing is known to be."""
    return find_mismatch(ranks) or find_stall(ranks)


def find_mismatch(ranks: Sequence[RankEvidence]) -> Verdict | None:
    """Return the first operation of a group that its members did not call alike."""
    first: dict[int, Fingerprint] | None = None
    for one in _mismatches(ranks):
        if first is None or _precedes(one, first):
            first = one
    return None if first is None else _judged(first, ranks)


def _mismatches(ranks: Sequence[RankEvidence]) -> Iterator[dict[int, Fingerprint]]:
    channels: dict[Channel, dict[int, dict[int, Fingerprint]]] = defaultdict(dict)
    for one in ranks:
        for found in one.fingerprints:
            channels[found.channel].setdefault(found.sequence, {})[one.rank] = found
    for sequences in channels.values():
        for sequence in sorted(sequences):
            if len({found.content for found in sequences[sequence].values()}) > 1:
                yield sequences[sequence]
                break


def _precedes(one: Mapping[int, Fingerprint], other: Mapping[int, Fingerprint]) -> bool:
    """Return whether a mismatch came before another: on a rank of both, or else by the clock."""
    for rank in one.keys() & other.keys():
        if one[rank].number != other[rank].number:
            return one[rank].number < other[rank].number
    at = min(found.issued_at for found in one.values())
    return at < min(found.issued_at for found in other.values())


def _judged(calls: Mapping[int, Fingerprint], ranks: Sequence[RankEvidence]) -> Verdict:
    """Return who is odd of those that made `calls`, the same operation of one group."""
    votes: dict[Content, list[int]] = defaultdict(list)
    for rank in sorted(calls):
        votes[calls[rank].content].append(rank)
    best, kin = most(votes), ()
    if best is None:
        more = _with_kin(votes, calls, ranks)
        best = most(more)
        kin = () if best is None else tuple(sorted({*more[best]} - {*votes[best]}))
    if best is None:
        return _unjudged([by[0] for by in votes.values()], calls, ranks)
    odd = tuple(rank for rank in sorted(calls) if calls[rank].content != best)
    others = tuple(votes[best])
    its, theirs = calls[odd[0]], calls[others[0]]
    programs = {one.rank: one for one in ranks}
    finding = _kind_of(its, theirs, programs[odd[0]], programs[others[0]])
    return Verdict(finding=finding, odd=odd, others=others, its=its, theirs=theirs, kin=kin)


def _unjudged(
    differing: Sequence[int], calls: Mapping[int, Fingerprint], ranks: Sequence[RankEvidence]
) -> Verdict:
    """Return all that made `calls`; first the one that is likely to be odd, by its own past."""
    first = likely({rank: call.number for rank, call in calls.items()}, ranks)
    differing = sorted(differing, key=lambda rank: rank != first)
    its, theirs = calls[differing[0]], calls[differing[1]]
    return Verdict(
        finding=_difference(its, theirs),
        odd=tuple(sorted(calls, key=lambda rank: (rank != first, rank))),
        others=(),
        its=its,
        theirs=theirs,
        likely=first is not None,
    )


def _with_kin(
    votes: Mapping[Content, Sequence[int]],
    calls: Mapping[int, Fingerprint],
    ranks: Sequence[RankEvidence],
) -> dict[Content, list[int]]:
    """Return the votes with those of ranks outside that ran the program of a member until then."""
    more = {content: list(by) for content, by in votes.items()}
    members = {one.rank: by_number(one) for one in ranks if one.rank in calls}
    for one in ranks:
        if one.rank in calls:
            continue
        program = by_number(one)
        for rank, call in calls.items():
            there = program.get(call.number)
            if there is None or not are_kin(members[rank], program, call.number):
                continue
            if there.group == call.group and there.content in more:
                more[there.content].append(one.rank)
                break
    return more


def _difference(its: Fingerprint, theirs: Fingerprint) -> Finding:
    if (its.kind, its.name) != (theirs.kind, theirs.name) and its.content[:2] != theirs.content[:2]:
        return Finding.OPERATION
    return Finding.DTYPE if its.dtype != theirs.dtype else Finding.SHAPE


def _kind_of(
    its: Fingerprint, theirs: Fingerprint, odd: RankEvidence, other: RankEvidence
) -> Finding:
    """Return in what way a call differs from that of the others, by what came before and after."""
    difference = _difference(its, theirs)
    if difference is not Finding.OPERATION or its.name == theirs.name:
        return difference
    mine = {one.sequence: one.content for one in odd.fingerprints if one.channel == its.channel}
    known = [one.content for one in other.fingerprints if one.channel == theirs.channel]
    if (theirs.content, its.content) in pairwise(known):
        return Finding.ORDER
    if mine.get(its.sequence + 1) == theirs.content and its.content not in known:
        return Finding.EXTRA
    return Finding.ORDER if its.content in known else Finding.OPERATION


def find_stall(ranks: Sequence[RankEvidence], moving_s: float = MOVING_S) -> Verdict | None:
    """Return whom the ranks that wait are waiting for in the end; None where something moves.

    A rank that has waited for less than `moving_s` may be about to go on. Where data still arrives,
    a link is slow and not cut, and nobody is named before the time is up (`moving_s` 0).
    """
    by_rank = {one.rank: one for one in ranks}
    waits = {one.rank: one.waiting for one in ranks if one.waiting is not None}
    missing = {rank: _missing(by_rank[rank], call, by_rank) for rank, call in waits.items()}
    blockers = {rank for absent in missing.values() for rank in absent}
    away = [rank for rank in blockers if rank not in waits]
    if away:
        return _absent(away, missing, waits, by_rank)
    if not waits or any(by_rank[rank].waited_s < moving_s for rank in waits):
        return None
    delivered = [rank for rank in waits if not missing[rank]]
    if delivered:
        return cut_link(delivered, waits, ranks, moving=moving_s > 0)
    return _circle(missing, waits, ranks)


def _missing(
    one: RankEvidence, call: Fingerprint, by_rank: Mapping[int, RankEvidence]
) -> tuple[int, ...]:
    """Return the ranks that have not begun what a rank waits in, as far as it depends on them."""
    needed = partners(call) if one.awaits is None else (one.awaits,)
    return tuple(
        rank
        for rank in needed
        if rank != one.rank and not (rank in by_rank and by_rank[rank].has_called(call))
    )


def _absent(
    away: Sequence[int],
    missing: Mapping[int, tuple[int, ...]],
    waits: Mapping[int, Fingerprint],
    by_rank: Mapping[int, RankEvidence],
) -> Verdict:
    """Return the rank that waits in no operation, and for which others wait."""
    order = list(_ENDED)

    def weight(rank: int) -> tuple[int, int, int]:
        activity = by_rank[rank].activity if rank in by_rank else Activity.UNKNOWN
        return (order.index(activity), -sum(rank in absent for absent in missing.values()), rank)

    odd = min(away, key=weight)
    there = by_rank.get(odd)
    waiting = sorted(rank for rank in waits if odd in missing[rank])
    theirs = waits[waiting[0]]
    together = tuple(rank for rank in waiting if waits[rank].channel == theirs.channel)
    if there is None or there.activity is Activity.UNKNOWN:
        cut = between((odd, *waiting), waits, list(by_rank.values()))
        if cut is not None:
            return cut
    return Verdict(
        finding=_ENDED[Activity.UNKNOWN if there is None else there.activity],
        odd=(odd,),
        others=together,
        its=None if there is None else there.last,
        theirs=theirs,
    )


def _circle(
    missing: Mapping[int, tuple[int, ...]],
    waits: Mapping[int, Fingerprint],
    ranks: Sequence[RankEvidence],
) -> Verdict:
    """Return who is odd of ranks that wait for one another in different operations.

    First those that left a program which two or more others went on with; then the only one of the
    circle that left the program of its kin; then those that the most waiting ranks wait for.
    """
    circle = _shortest_circle(missing)
    left = departure(ranks) or alone(circle, ranks)
    if left is not None:
        its, theirs = (
            by_number(_of(ranks, one[0]))[left.number] for one in (left.odd, left.others)
        )
        finding = _kind_of(its, theirs, _of(ranks, left.odd[0]), _of(ranks, left.others[0]))
        return Verdict(finding=finding, odd=left.odd, others=left.others, its=its, theirs=theirs)
    votes: dict[tuple[Channel, int], list[int]] = defaultdict(list)
    for rank, call in waits.items():
        votes[(call.channel, call.sequence)].append(rank)
    best, is_likely = most(votes), False
    if best is None:
        first = likely({rank: waits[rank].number for rank in circle}, ranks)
        is_likely = first is not None
        odd, others = tuple(sorted(circle, key=lambda rank: (rank != first, rank))), ()
        its, theirs = waits[odd[0]], waits[odd[1]]
    else:
        others = tuple(sorted(votes[best]))
        theirs = waits[others[0]]
        odd = tuple(sorted(rank for rank in partners(theirs) if rank not in others))
        its = waits[odd[0]]
    return Verdict(
        finding=Finding.APART, odd=odd, others=others, its=its, theirs=theirs, likely=is_likely
    )


def _shortest_circle(missing: Mapping[int, tuple[int, ...]]) -> list[int]:
    """Return the ranks of the smallest circle in which each waits for the next."""
    found: list[int] = sorted(missing)
    for start in sorted(missing):
        before: dict[int, int] = {}
        ahead = deque([start])
        while ahead and start not in before:
            one = ahead.popleft()
            for awaited in missing.get(one, ()):
                if awaited not in before:
                    before[awaited] = one
                    ahead.append(awaited)
        circle = [start]
        while start in before and before[circle[-1]] != start:
            circle.append(before[circle[-1]])
        if start in before and len(circle) < len(found):
            found = sorted(circle)
    return found


def _of(ranks: Sequence[RankEvidence], rank: int) -> RankEvidence:
    return next(one for one in ranks if one.rank == rank)


def cut_link(
    delivered: Sequence[int],
    waits: Mapping[int, Fingerprint],
    ranks: Sequence[RankEvidence],
    *,
    moving: bool,
) -> Verdict | None:
    """Return between whom nothing arrives that `delivered` wait for, whose members have all called.

    None where data still arrives, if `moving` counts: a slow link is no cut one.
    """
    seen = between(delivered, waits, ranks)
    if seen is not None:
        return seen
    if moving and something_arrives(ranks):
        return None
    return _by_waits(delivered, waits, {one.rank: one for one in ranks})


def between(
    concerned: Sequence[int], waits: Mapping[int, Fingerprint], ranks: Sequence[RankEvidence]
) -> Verdict | None:
    """Return the links of the ranks `concerned` that are seen to be cut; None where none is.

    A rank that is an end of all of them is odd; of one link both ends are named.
    """
    links = [one for one in cut_links(ranks) if {*one.ends} & {*concerned}]
    if not links:
        return None
    by_rank = {one.rank: one for one in ranks}
    shared = common_end(links)
    odd: tuple[int, ...] = links[0].ends
    others: tuple[int, ...] = ()
    if shared is not None:
        odd = (shared,)
        others = tuple(sorted({end for link in links for end in link.ends} - {shared}))
    wait = waits.get(odd[0])
    mates = [rank for rank in others if wait is not None and rank in partners(wait)]
    other = [*mates, *others, *odd[1:]][0]
    calls = [waits[rank] for rank in (odd[0], other, *concerned) if rank in waits]
    call = next((one for one in calls if {odd[0], other} <= {*partners(one)}), calls[0])
    its, theirs = (
        _same_call(by_rank.get(rank), call) or waits.get(rank) or _last(by_rank.get(rank))
        for rank in (odd[0], other)
    )
    return Verdict(
        finding=Finding.LINK, odd=odd, others=others, its=its, theirs=theirs, links=tuple(links)
    )


def _by_waits(
    delivered: Sequence[int], waits: Mapping[int, Fingerprint], by_rank: Mapping[int, RankEvidence]
) -> Verdict:
    """Return the rank for whose messages the most wait; all members where that is not known."""
    awaited = Counter[int]()
    for rank in delivered:
        one, call = by_rank[rank], waits[rank]
        ends = [end for end in call.ends or () if end != rank]
        awaited.update([one.awaits] if one.awaits is not None else ends)
    first, *rest = awaited.most_common(2) or [(None, 0)]
    if first[0] is not None and first[1] > 1 and not (rest and rest[0][1] == first[1]):
        odd = (first[0],)
        others = tuple(sorted(rank for rank in delivered if rank != first[0]))
    else:
        odd, others = tuple(sorted({*delivered, *awaited})), ()
    its = _same_call(by_rank.get(odd[0]), waits[delivered[0]])
    theirs = waits[others[0]] if others else _same_call(by_rank.get(odd[-1]), its)
    return Verdict(finding=Finding.LINK, odd=odd, others=others, its=its, theirs=theirs)


def _same_call(one: RankEvidence | None, call: Fingerprint | None) -> Fingerprint | None:
    """Return what a rank did for its part of an operation."""
    if one is None or call is None:
        return None
    here = (one for one in one.fingerprints if one.channel == call.channel)
    return next((one for one in here if one.sequence == call.sequence), None)


def _last(one: RankEvidence | None) -> Fingerprint | None:
    return None if one is None else one.last


COMMON_PAST = 8
"""How many operations ranks must have had in common, one after the other, to judge each other."""
_TWICE = 2  # like places, from which on a rank has a habit

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Say which ranks left the program that others went on with, and where."""

    odd: tuple[int, ...]
    others: tuple[int, ...]
    number: int


def by_number(one: RankEvidence) -> dict[int, Fingerprint]:
    """Return the fingerprints of a rank by their numbers."""
    return {found.number: found for found in one.fingerprints}


def past_in_common(
    mine: Mapping[int, Fingerprint], other: Mapping[int, Fingerprint], number: int
) -> int:
    """Return how many operations just before `number` two ranks have in common."""
    count = 0
    for earlier in range(number - 1, 0, -1):
        ours, theirs = mine.get(earlier), other.get(earlier)
        if ours is None or theirs is None or ours.place_in_program != theirs.place_in_program:
            break
        count += 1
    return count


def are_kin(mine: Mapping[int, Fingerprint], other: Mapping[int, Fingerprint], number: int) -> bool:
    """Return whether two ranks ran one program until `number`: from its start, or for long."""
    common = past_in_common(mine, other, number)
    return common >= COMMON_PAST or common == number - 1


def most(votes: Mapping[K, Iterable[int]]) -> K | None:
    """Return what strictly more ranks stand for than for anything else; None where none does."""
    ranked = sorted(votes, key=lambda key: len(set(votes[key])), reverse=True)
    if len(ranked) == 1:
        return ranked[0]
    if not ranked or len(set(votes[ranked[0]])) == len(set(votes[ranked[1]])):
        return None
    return ranked[0]


def departure(ranks: Sequence[RankEvidence]) -> Departure | None:
    """Return who left a program that at least two others went on with; None where nobody did.

    Programs that differ, as those of pipeline stages do, part in every step: of all places where
    some left others, the one with the longest common past counts, and it is a long one.
    """
    programs = {one.rank: by_number(one) for one in ranks}
    found: list[tuple[int, Departure]] = []
    for number in sorted({number for program in programs.values() for number in program}):
        for kin in _with_one_past(programs, number):
            votes: dict[object, set[int]] = defaultdict(set)
            for rank in kin:
                votes[programs[rank][number].place_in_program].add(rank)
            best = most(votes)
            if len(votes) < 2 or best is None or len(votes[best]) < 2:
                continue
            odd = tuple(sorted(rank for rank in kin if rank not in votes[best]))
            others = tuple(sorted(votes[best]))
            past = past_in_common(programs[odd[0]], programs[others[0]], number)
            found.append((past, Departure(odd=odd, others=others, number=number)))
    return max(found, key=lambda one: (one[0], -one[1].number))[1] if found else None


def alone(circle: Sequence[int], ranks: Sequence[RankEvidence]) -> Departure | None:
    """Return the only rank of a circle that left the program of its kin, which is not in it."""
    programs = {one.rank: by_number(one) for one in ranks}
    found: list[Departure] = []
    for rank in circle:
        kin = [other for other in programs if other not in circle]
        places = ((_parted(programs[rank], programs[other]), other) for other in kin)
        first = min(((place, other) for place, other in places if place is not None), default=None)
        if first is not None:
            found.append(Departure(odd=(rank,), others=(first[1],), number=first[0]))
    return found[0] if len(found) == 1 else None


def left_own_past(program: Mapping[int, Fingerprint], number: int) -> bool | None:
    """Return whether a rank called something else at `number` than at each like place before.

    Like places are those with the same calls, at the same tasks, just before them. None where there
    are fewer than two, or where what followed differed already.
    """
    if number not in program:
        return None
    last = _before(program, number)
    if last is None:
        return None
    followed = [
        _with_task(program[earlier])
        for earlier in sorted(program)
        if earlier < number and _before(program, earlier) == last
    ]
    if len(followed) < _TWICE or len(set(followed)) > 1:
        return None
    return followed[0] != _with_task(program[number])


def likely(calls: Mapping[int, int], ranks: Sequence[RankEvidence]) -> int | None:
    """Return the only rank that left its own past in its call `calls[rank]`; None of several.

    All others must have done there what they always did: a rank whose past tells nothing may be the
    odd one, too.
    """
    left = {
        one.rank: left_own_past(by_number(one), calls[one.rank])
        for one in ranks
        if one.rank in calls
    }
    odd = [rank for rank, has_left in left.items() if has_left]
    return odd[0] if len(odd) == 1 and None not in left.values() else None


def _before(program: Mapping[int, Fingerprint], number: int) -> tuple[object, ...] | None:
    before = [program.get(earlier) for earlier in range(number - COMMON_PAST, number)]
    found = tuple(_with_task(one) for one in before if one is not None)
    return found if len(found) == COMMON_PAST else None


def _with_task(one: Fingerprint) -> tuple[object, ...]:
    return (one.place_in_program, one.task)


def _parted(mine: Mapping[int, Fingerprint], theirs: Mapping[int, Fingerprint]) -> int | None:
    """Return where two ranks that long ran one program parted; None where they did not."""
    common = 0
    for number in sorted(mine.keys() & theirs.keys()):
        if mine[number].place_in_program == theirs[number].place_in_program:
            common += 1
        elif common >= COMMON_PAST:
            return number
        else:
            common = 0
    return None


def _with_one_past(
    programs: Mapping[int, Mapping[int, Fingerprint]], number: int
) -> Iterable[list[int]]:
    """Return the ranks that began operation `number`, by what they began just before it."""
    kin: dict[object, list[int]] = defaultdict(list)
    for rank, program in programs.items():
        before = [program.get(earlier) for earlier in range(number - COMMON_PAST, number)]
        if number in program and None not in before:
            kin[tuple(one.place_in_program for one in before if one is not None)].append(rank)
    return kin.values()
