# SPDX-License-Identifier: Apache-2.0
"""Ring all-reduce: two phases, each of n-1 steps to the next member, or one of them alone.

Split:       the tensor, into n chunks; their sizes differ by one element at most.
Sent:        phase 1, reduce-scatter: in step s member i sends chunk i-s, and adds chunk i-s-1 that
             comes. After it member i owns the sum of chunk i+1. Phase 2, all-gather: it sends chunk
             i+1-s, and keeps chunk i-s that comes. Alone, either phase has its chunks one place
             on: member i owns slice i, as slices lie everywhere else.
Bytes:       2 (n-1)/n M; of odd sizes 2 M less two chunks; n-1 slices of one phase:
             `cost/bytes/all_reduce.py`.
Must divide: nothing.
Source:      Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
             workstations, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.parallel.transport.algorithms.steps import Member, Part, Step


def ring_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member around all of its group."""
    return ring_over(range(member.size), member.place, Part(0, num_elements).chunks(member.size))


def ring_scatter_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return phase 1 alone, after which this member owns its own slice."""
    slices = Part(0, num_elements).chunks(member.size)
    return scatter_phase(range(member.size), member.place, slices, ahead=0)


def ring_gather_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return phase 2 alone, before which this member has its own slice."""
    slices = Part(0, num_elements).chunks(member.size)
    return gather_phase(range(member.size), member.place, slices, ahead=0)


def ring_over(places: Sequence[int], index: int, chunks: Sequence[Part]) -> tuple[Step, ...]:
    """Return the steps that sum `chunks` around the members at `places`, of which this is `index`.

    There are as many chunks as members. A ring of one has no steps.
    """
    return (*scatter_phase(places, index, chunks), *gather_phase(places, index, chunks))


def scatter_phase(
    places: Sequence[int], index: int, chunks: Sequence[Part], *, ahead: int = 1
) -> tuple[Step, ...]:
    """Return phase 1, after which this member owns the sum of chunk `index + ahead`."""
    size, last = len(places), index + ahead - 1
    after, before = places[(index + 1) % size], places[index - 1]
    return tuple(
        Step(
            sends=((after, chunks[(last - step) % size]),),
            receives=((before, chunks[(last - step - 1) % size]),),
            adds=True,
        )
        for step in range(size - 1)
    )


def gather_phase(
    places: Sequence[int], index: int, chunks: Sequence[Part], *, ahead: int = 1
) -> tuple[Step, ...]:
    """Return phase 2, in which each chunk goes around to all who do not have it.

    This member begins with chunk `index + ahead`.
    """
    size, own = len(places), index + ahead
    after, before = places[(index + 1) % size], places[index - 1]
    return tuple(
        Step(
            sends=((after, chunks[(own - step) % size]),),
            receives=((before, chunks[(own - step - 1) % size]),),
        )
        for step in range(size - 1)
    )
