"""Ring all-reduce: two phases, each of n-1 steps to the next member.

Split:       the tensor, into n chunks; their sizes differ by one element at most.
Sent:        phase 1, reduce-scatter: in step s member i sends chunk i-s, and adds chunk i-s-1 that
             comes. After it member i owns the sum of chunk i+1. Phase 2, all-gather: it sends chunk
             i+1-s, and keeps chunk i-s that comes.
Bytes:       2 (n-1)/n M; of odd sizes 2 M less two chunks: `cost/bytes/all_reduce.py`.
Must divide: nothing.
Source:      Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
             workstations, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.parallel.transport.algorithms.steps import Member, Part, Step


def ring_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member around all of its group."""
    return ring_over(range(member.size), member.place, Part(0, num_elements))


def ring_over(places: Sequence[int], index: int, whole: Part) -> tuple[Step, ...]:
    """Return the steps that sum `whole` around the members at `places`, of which this is `index`.

    A ring of one has none.
    """
    return (*scatter_phase(places, index, whole), *gather_phase(places, index, whole))


def scatter_phase(places: Sequence[int], index: int, whole: Part) -> tuple[Step, ...]:
    """Return phase 1, after which this member owns the sum of chunk `index + 1`."""
    size = len(places)
    after, before = places[(index + 1) % size], places[index - 1]
    return tuple(
        Step(
            sends=((after, whole.chunk(index - step, size)),),
            receives=((before, whole.chunk(index - step - 1, size)),),
            adds=True,
        )
        for step in range(size - 1)
    )


def gather_phase(places: Sequence[int], index: int, whole: Part) -> tuple[Step, ...]:
    """Return phase 2, in which each sum goes around to all who do not have it."""
    size = len(places)
    after, before = places[(index + 1) % size], places[index - 1]
    return tuple(
        Step(
            sends=((after, whole.chunk(index + 1 - step, size)),),
            receives=((before, whole.chunk(index - step, size)),),
        )
        for step in range(size - 1)
    )
