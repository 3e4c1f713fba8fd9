# SPDX-License-Identifier: Apache-2.0
"""Recursive halving and doubling: pairs exchange halves of what is left, and go the way back.

Split:       the tensor, into n chunks, of which a pair that is d places apart halves 2 d.
Sent:        d = n/2, ..., 2, 1: the half that the other keeps, which it adds; after this place i
             owns the sum of chunk i. d = 1, 2, ..., n/2: what this one has, which the other keeps.
Bytes:       2 (n-1)/n M in 2 log2 n steps; n-1 slices one way: `cost/bytes/all_reduce.py`.
Must divide: n is a power of two (rule `halving-needs-power-of-two`).
Source:      Rabenseifner, Optimization of Collective Reduction Operations, 2004; Thakur et al.,
             2005.
"""

from __future__ import annotations

from echelon.parallel.transport.algorithms.steps import Member, Part, Step


def halving_doubling_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member of a group of a power of two."""
    return (*halving_steps(member, num_elements), *doubling_steps(member, num_elements))


def halving_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the way there, after which this member owns the sum of the chunk of its place."""
    return tuple(
        Step(sends=((other, theirs),), receives=((other, mine),), adds=True)
        for other, mine, theirs in _halves(member, num_elements)
    )


def doubling_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the way back, before which this member has the chunk of its place."""
    return tuple(
        Step(sends=((other, mine),), receives=((other, theirs),))
        for other, mine, theirs in reversed(_halves(member, num_elements))
    )


def _halves(member: Member, num_elements: int) -> list[tuple[int, Part, Part]]:
    """Return with whom this member exchanges halves, the one that it keeps, and the other."""
    whole, place, size = Part(0, num_elements), member.place, member.size
    found: list[tuple[int, Part, Part]] = []
    distance = size // 2
    while distance:
        other = place ^ distance
        mine, theirs = (_block(whole, one, distance, size) for one in (place, other))
        found.append((other, mine, theirs))
        distance //= 2
    return found


def _block(whole: Part, place: int, length: int, size: int) -> Part:
    """Return the aligned block of `length` chunks that the chunk of `place` is in."""
    first = place // length * length
    return Part(whole.chunk(first, size).start, whole.chunk(first + length - 1, size).stop)
