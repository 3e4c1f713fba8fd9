# SPDX-License-Identifier: Apache-2.0
"""Bytes that one member sends to sum a tensor, by algorithm, exact for any size and any member.

And to scatter a sum or to gather slices, which takes the same bytes either way.

n is the size of the group, l how many of its members each node holds, k = n / l, E the elements,
and chunk(i, m, E) how many of them chunk i of m has: floor((i+1) E / m) - floor(i E / m).

    backend           2 (n-1)/n E, as it is told of a ring
    ring              2 E - chunk(i+1, n) - chunk(i+2, n)
    tree              E (but place 0), and E to each child
    halving-doubling  E - chunk(i, n), and the blocks of 1, 2, ..., n/2 chunks that i is in
    hierarchical      E - c + (l-1) c inside of nodes, c = chunk(i mod l, l); across them a ring of
                      k over these c

What arrives to be added lands beside the tensor, E elements of a ring chunk by chunk:

    ring              its largest chunk but chunk i
    tree              E, where there is a child
    halving-doubling  the block of n/2 chunks that i is in
    hierarchical      (l-1) c, or a chunk of the ring across nodes

n equal slices of p bytes are summed, or gathered; n-1 of them are sent, inside of nodes and across:

    backend, tree     to each other member: (l-1) p and (n-l) p
    ring              all to the next member
    halving-doubling  n/2, n/4, ..., 1 slices to members that far away
    hierarchical      k (l-1) p and (k-1) p

To be summed, of slices there are beside the tensor, partial sums and what arrives,

    backend, tree     n-1
    ring              2, of two members 1
    halving-doubling  n/2 and n/4, of two members 1
    hierarchical      k (l-1), or k + 1 where that is more

Source: Patarasuk and Yuan, 2009; Thakur et al., 2005; Rabenseifner, 2004.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from echelon.core.choices.collective_algorithms import (
    BACKEND,
    COLLECTIVE_ALGORITHMS,
    HIERARCHICAL,
    algorithm_of_group,
    members_per_node,
)
from echelon.core.plan import Plan
from echelon.cost.bytes.terms import all_reduce_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SumGroup:
    """Say by what algorithm a group sums, on which nodes its members are, and which this is."""

    algorithm: str
    place: int
    nodes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return how many members the group has."""
        return len(self.nodes)

    @property
    def per_node(self) -> int:
        """Return how many members each node holds; 0 where nodes hold different numbers."""
        return members_per_node(self.nodes, 1)

    def bytes(self, num_elements: int, element_bytes: int) -> int:
        """Return the bytes that this member sends to sum so many elements."""
        return sum(self.bytes_by_tier(num_elements, element_bytes))

    def bytes_by_tier(self, num_elements: int, element_bytes: int) -> tuple[int, int]:
        """Return what it sends inside of its node, and to other nodes.

        The backend is told of as a ring in the order of ranks, which is what Gloo does.
        """
        count, place, size = num_elements, self.place, self.size
        if self.algorithm == BACKEND:
            sent = all_reduce_bytes(count * element_bytes, size)
            return (0, sent) if self._leaves_node(place + 1) else (sent, 0)
        if self.algorithm == "ring":
            sent = _ring(count, place, size) * element_bytes
            return (0, sent) if self._leaves_node(place + 1) else (sent, 0)
        if self.algorithm == HIERARCHICAL:
            local = self.per_node
            node, index = divmod(place, local)
            own = _chunk(count, index, local)
            near = count - own + (local - 1) * own
            return near * element_bytes, _ring(own, node, size // local) * element_bytes
        sends = _tree if self.algorithm == "tree" else _halving
        near, far = self._by_tier(sends(count, place, size))
        return near * element_bytes, far * element_bytes

    @property
    def scatters(self) -> bool:
        """Return whether steps of messages sum and gather slices, too; pairs of members if not."""
        return COLLECTIVE_ALGORITHMS[self.algorithm].scatters and self.size > 1

    def slice_bytes_by_tier(self, piece: int) -> tuple[int, int]:
        """Return what it sends to scatter a sum into slices of `piece` bytes, or to gather them.

        Inside of its node, and to other nodes.
        """
        sends = ((other, count * piece) for other, count in self._slices_sent())
        return self._by_tier(sends)

    def _slices_sent(self) -> Iterator[tuple[int, int]]:
        """Yield to whom it sends slices, and how many."""
        place, size = self.place, self.size
        if self.algorithm == "ring":
            yield place + 1, size - 1
        elif self.algorithm == "halving-doubling":
            yield from ((place ^ 1 << bit, 1 << bit) for bit in range(size.bit_length() - 1))
        elif self.algorithm == HIERARCHICAL:
            local = self.per_node
            node = place // local * local
            near = (one for one in range(node, node + local) if one != place)
            yield from ((one, size // local) for one in near)
            yield place + local, size // local - 1
        else:
            yield from ((one, 1) for one in range(size) if one != place)

    def slices_beside(self) -> int:
        """Return how many slices are beside the tensor of which a sum is scattered."""
        size, local = self.size, self.per_node
        if not self.scatters or size == 2:
            return size - 1
        if self.algorithm == "ring":
            return 2
        if self.algorithm == HIERARCHICAL:
            nodes = size // local
            return max((local - 1) * nodes, nodes + 1)
        return size // 2 + size // 4

    def _by_tier(self, sends: Iterable[tuple[int, int]]) -> tuple[int, int]:
        near = far = 0
        for other, sent in sends:
            if self._leaves_node(other):
                far += sent
            else:
                near += sent
        return near, far

    def arriving_elements(self, num_elements: int) -> int:
        """Return the most elements that arrive at one time to be added to those that are here.

        They land beside the tensor, step by step; what replaces elements is received in its place.
        What a backend takes inside is not known.
        """
        count, place, size = num_elements, self.place, self.size
        if self.algorithm == BACKEND or size == 1:
            return 0
        if self.algorithm == "ring":
            return _arriving_of_ring(count, place, size)
        if self.algorithm == "tree":
            return count if place % 2 == 0 and place + 1 < size else 0
        if self.algorithm == HIERARCHICAL:
            local = self.per_node
            node, index = divmod(place, local)
            own = _chunk(count, index, local)
            return max((local - 1) * own, _arriving_of_ring(own, node, size // local))
        half = size // 2
        first = place // half * half
        return (first + half) * count // size - first * count // size

    def most_arriving_elements(self, num_elements: int) -> int:
        """Return the same of the member to which most arrives."""
        if self.algorithm == BACKEND:
            return 0
        members = (replace(self, place=place) for place in range(self.size))
        return max(one.arriving_elements(num_elements) for one in members)

    def _leaves_node(self, other: int) -> bool:
        """Return whether member `other` is on another node."""
        return self.nodes[other % self.size] != self.nodes[self.place]


def sum_group(plan: Plan, ranks: tuple[int, ...], rank: int) -> SumGroup:
    """Return how the group of `ranks` sums under a plan, and which member `rank` is."""
    node, chosen = plan.cluster.devices_per_node, plan.layout.collectives.algorithm
    return SumGroup(
        algorithm=algorithm_of_group(chosen, ranks, node),
        place=ranks.index(rank),
        nodes=tuple(one // node for one in ranks),
    )


def slices_sent(plan: Plan, ranks: tuple[int, ...], rank: int, piece: int) -> tuple[int, int]:
    """Return what `rank` sends to sum, or to gather, slices of `piece` bytes, and how much far.

    To other nodes, that is.
    """
    near, far = sum_group(plan, ranks, rank).slice_bytes_by_tier(piece)
    return near + far, far


def sums_sent(
    plan: Plan, ranks: tuple[int, ...], rank: int, elements: Iterable[int], size: int
) -> tuple[int, int]:
    """Return what `rank` sends to sum tensors of so many elements of `size` bytes, and how much of
    it to other nodes."""
    group = sum_group(plan, ranks, rank)
    tiers = [group.bytes_by_tier(count, size) for count in elements]
    return sum(map(sum, tiers)), sum(far for _, far in tiers)


def ring_sent(plan: Plan, ranks: tuple[int, ...], rank: int, payload: int) -> tuple[int, int]:
    """Bytes that `rank` sends in an all-reduce of the backend: all, and to other nodes."""
    group = replace(sum_group(plan, ranks, rank), algorithm=BACKEND)
    near, far = group.bytes_by_tier(payload, 1)
    return near + far, far


def num_elsewhere(plan: Plan, ranks: Iterable[int], rank: int) -> int:
    """Number of `ranks` on other nodes than the node of `rank`."""
    node = plan.cluster.devices_per_node
    return sum(other // node != rank // node for other in ranks)


def pairs_sent(plan: Plan, ranks: tuple[int, ...], rank: int, piece: int) -> tuple[int, int]:
    """Return what `rank` sends where each hands `piece` bytes to all others, and how much far."""
    return (len(ranks) - 1) * piece, num_elsewhere(plan, ranks, rank) * piece


def _chunk(count: int, index: int, chunks: int) -> int:
    index %= chunks
    return (index + 1) * count // chunks - index * count // chunks


def _ring(count: int, place: int, size: int) -> int:
    if size == 1:
        return 0
    return 2 * count - _chunk(count, place + 1, size) - _chunk(count, place + 2, size)


def _arriving_of_ring(count: int, place: int, size: int) -> int:
    """Return the largest chunk that comes in phase 1: any but the one that starts here."""
    return max((_chunk(count, place + step, size) for step in range(1, size)), default=0)


def _tree(count: int, place: int, size: int) -> list[tuple[int, int]]:
    """Return to whom a member of a binomial tree sends, and how much."""
    lowest = place & -place if place else size
    bits = (1 << power for power in range(size.bit_length()))
    children = [place + bit for bit in bits if bit < lowest and place + bit < size]
    parents = [place - lowest] if place else []
    return [(other, count) for other in (*parents, *children)]


def _halving(count: int, place: int, size: int) -> list[tuple[int, int]]:
    """Return to whom a member sends halves, and how much: both ways together."""
    sent: list[tuple[int, int]] = []
    distance = size // 2
    while distance:
        for half in (place ^ distance, place):
            first = half // distance * distance
            block = (first + distance) * count // size - first * count // size
            sent.append((place ^ distance, block))
        distance //= 2
    return sent
