"""Recursive halving and doubling: pairs exchange halves of what is left, and go the way back.

Split:       the tensor, into n chunks, of which a pair that is d places apart halves 2 d.
Sent:        d = n/2, ..., 2, 1: the half that the other keeps, which it adds; after this place i
             owns the sum of chunk i. d = 1, 2, ..., n/2: what this one has, which the other keeps.
Bytes:       2 (n-1)/n M in 2 log2 n steps: `cost/bytes/all_reduce.py`.
Must divide: n is a power of two (rule `halving-needs-power-of-two`).
Source:      Rabenseifner, Optimization of Collective Reduction Operations, 2004; Thakur et al.,
             2005.
"""

from __future__ import annotations

from echelon.parallel.transport.algorithms.steps import Member, Part, Step


def halving_doubling_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member of a group of a power of two."""
    whole, place, size = Part(0, num_elements), member.place, member.size
    halving: list[Step] = []
    doubling: list[Step] = []
    distance = size // 2
    while distance:
        other = place ^ distance
        mine, theirs = (_block(whole, one, distance, size) for one in (place, other))
        halving.append(Step(sends=((other, theirs),), receives=((other, mine),), adds=True))
        doubling.append(Step(sends=((other, mine),), receives=((other, theirs),)))
        distance //= 2
    return (*halving, *reversed(doubling))


def _block(whole: Part, place: int, length: int, size: int) -> Part:
    """Return the aligned block of `length` chunks that the chunk of `place` is in."""
    first = place // length * length
    return Part(whole.chunk(first, size).start, whole.chunk(first + length - 1, size).stop)
