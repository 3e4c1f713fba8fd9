"""Hierarchical all-reduce: inside of nodes, across them, inside: few bytes on the slow links.

Split:       the tensor, into l parts among the l members of a node; each part into k chunks among
             the k nodes.
Sent:        reduce-scatter inside of a node, each part straight to its owner; a ring all-reduce of
             each part among those who own it, one on each node, all l rings at once; all-gather
             inside of the node, straight to all.
Bytes:       2 (l-1)/l M inside of nodes and 2 (k-1)/k M/l across them, together the 2 (n-1)/n M of
             a ring: `cost/bytes/all_reduce.py`. A node sends 2 (k-1)/k M to others, where a ring
             of all sends 2 (n-1)/n M.
Must divide: each of k > 1 nodes holds l > 1 members (rule `hierarchy-needs-even-nodes`).
Source:      Thakur et al., 2005 (pairwise exchange); Patarasuk and Yuan, 2009 (ring).
"""

from __future__ import annotations

from echelon.parallel.transport.algorithms.ring import ring_over
from echelon.parallel.transport.algorithms.steps import Member, Part, Step


def hierarchical_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member, whose group lies node by node."""
    whole, local = Part(0, num_elements), member.per_node
    node, index = divmod(member.place, local)
    own = whole.chunk(index, local)
    # The next neighbour first, so that not all of them send to the same one at once.
    others = [(index + step) % local for step in range(1, local)]
    theirs = tuple((node * local + other, whole.chunk(other, local)) for other in others)
    mine = tuple((place, own) for place, _ in theirs)
    across = ring_over(range(index, member.size, local), node, own)
    return (
        Step(sends=theirs, receives=mine, adds=True),
        *across,
        Step(sends=mine, receives=theirs),
    )
