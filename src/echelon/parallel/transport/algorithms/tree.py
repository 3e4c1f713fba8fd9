# SPDX-License-Identifier: Apache-2.0
"""Tree all-reduce: sums go up a binomial tree to place 0, and the total comes down again.

Split:       nothing: each message is the whole tensor.
Sent:        place i gets from i + 1, i + 2, i + 4, ... below its own lowest set bit, adds, and
             sends the sum to i less that bit; then the same way back.
Bytes:       M up (place 0: none), and M down to each child: `cost/bytes/all_reduce.py`. Few steps,
             many bytes: for small tensors.
Must divide: nothing.
Source:      Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005
             (binomial tree).
"""

from __future__ import annotations

from echelon.parallel.transport.algorithms.steps import Member, Part, Step


def tree_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member: up the tree, then down."""
    whole, place, size = Part(0, num_elements), member.place, member.size
    up: list[Step] = []
    down: list[Step] = []
    bit = 1
    while bit < size:
        if place & bit:
            up.append(Step(sends=((place - bit, whole),)))
            down.append(Step(receives=((place - bit, whole),)))
            break
        if place + bit < size:
            up.append(Step(receives=((place + bit, whole),), adds=True))
            down.append(Step(sends=((place + bit, whole),)))
        bit *= 2
    return (*up, *reversed(down))
