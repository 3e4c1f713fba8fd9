# SPDX-License-Identifier: Apache-2.0
"""Sums inside of nodes, then across them, and back: few bytes on the slow links.

Split:       an all-reduce: the tensor, into l parts among the l members of a node; each part into k
             chunks among the k nodes. A reduce-scatter or an all-gather: n slices, of which member
             j of node a has slice a l + j, as everywhere else.
Sent:        all-reduce: reduce-scatter inside of a node, each part straight to its owner; a ring
             all-reduce of each part among those who own it, one on each node, all l rings at once;
             all-gather inside of the node, straight to all.
             Reduce-scatter: inside of a node member j is sent the k slices of the members j of all
             nodes, and adds them; around the ring of these members each slice comes to its node.
             All-gather: a slice goes around the ring of the members j first; then each sends the k
             slices that it has to all of its node.
Bytes:       all-reduce: 2 (l-1)/l M inside of nodes and 2 (k-1)/k M/l across them, together the
             2 (n-1)/n M of a ring: `cost/bytes/all_reduce.py`. A node sends 2 (k-1)/k M to others,
             where a ring of all sends 2 (n-1)/n M. Either of the others: k (l-1) slices inside, k-1
             across, where an exchange of all pairs sends n-l across.
Must divide: each of k > 1 nodes holds l > 1 members (rule `hierarchy-needs-even-nodes`).
Source:      Thakur et al., 2005 (pairwise exchange); Patarasuk and Yuan, 2009 (ring).
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.parallel.transport.algorithms.ring import gather_phase, ring_over, scatter_phase
from echelon.parallel.transport.algorithms.steps import Member, Part, Step


def hierarchical_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member, whose group lies node by node."""
    here = _Node(member)
    parts = Part(0, num_elements).chunks(member.per_node)
    across = ring_over(here.ring, here.node, parts[here.index].chunks(here.num_nodes))
    return (
        here.to_owners([(part,) for part in parts]),
        *across,
        here.to_all([(part,) for part in parts]),
    )


def hierarchical_scatter_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps after which this member owns the sum of its slice."""
    here = _Node(member)
    slices = here.slices_by_index(num_elements)
    across = scatter_phase(here.ring, here.node, slices[here.index], ahead=0)
    return here.to_owners(slices), *across


def hierarchical_gather_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps by which this member, which has its slice, gets those of all others."""
    here = _Node(member)
    slices = here.slices_by_index(num_elements)
    across = gather_phase(here.ring, here.node, slices[here.index], ahead=0)
    return *across, here.to_all(slices)


@dataclass(frozen=True, slots=True)
class _Node:
    """Say where a member is: on which node, and which one of it; and speak to the others there."""

    member: Member

    @property
    def node(self) -> int:
        """Return the number of its node."""
        return self.member.place // self.member.per_node

    @property
    def index(self) -> int:
        """Return which one of its node it is."""
        return self.member.place % self.member.per_node

    @property
    def num_nodes(self) -> int:
        """Return k."""
        return self.member.size // self.member.per_node

    @property
    def ring(self) -> range:
        """Return the places of the members with its index, node by node."""
        return range(self.index, self.member.size, self.member.per_node)

    def slices_by_index(self, num_elements: int) -> list[tuple[Part, ...]]:
        """Return the slices of the members 0 of all nodes, of the members 1, and so on."""
        slices, local = Part(0, num_elements).chunks(self.member.size), self.member.per_node
        return [slices[index::local] for index in range(local)]

    def to_owners(self, parts: list[tuple[Part, ...]]) -> Step:
        """Return the step in which member j of the node gets its `parts[j]` from all to be added.

        The next neighbour comes first, so that not all of them send to the same one at once.
        """
        own = parts[self.index]
        return Step(
            sends=tuple((place, one) for index, place in self._others() for one in parts[index]),
            receives=tuple((place, one) for _, place in self._others() for one in own),
            adds=True,
        )

    def to_all(self, parts: list[tuple[Part, ...]]) -> Step:
        """Return the step in which member j of the node sends its `parts[j]` to all others."""
        own = parts[self.index]
        return Step(
            sends=tuple((place, one) for _, place in self._others() for one in own),
            receives=tuple((place, one) for index, place in self._others() for one in parts[index]),
        )

    def _others(self) -> list[tuple[int, int]]:
        """Return index and place of the others of the node, the next one first."""
        local = self.member.per_node
        indices = [(self.index + step) % local for step in range(1, local)]
        return [(index, self.node * local + index) for index in indices]
