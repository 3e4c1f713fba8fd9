# SPDX-License-Identifier: Apache-2.0
"""Who may judge: ranks that have made the same calls as another until now. No torch.

Ranks that differ in nothing but their place run one program: operation n of one is operation n of
the other, over a group of the same axis. So where two members of a pair differ, the ranks of other
pairs that agreed with them until then say which of the two left the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from echelon.launch.desync.fingerprint import Fingerprint, RankEvidence

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
