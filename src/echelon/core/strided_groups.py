# SPDX-License-Identifier: Apache-2.0
"""How groups of a mesh lie on nodes, by arithmetic: without lists of ranks, which may be long.

The ranks of a group over neighbouring axes are as far apart as there are ranks in the axes inside.
So `stride` groups of `count` ranks fill a block of the mesh, and each block is as the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from echelon.core.axis import SHARD_AXES
from echelon.core.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedGroups:
    """Groups of `count` ranks that are `stride` apart, `stride` groups in each of `blocks`."""

    blocks: int
    stride: int
    count: int

    def starts(self, node: int) -> list[int]:
        """First ranks of groups that lie differently on nodes of `node` devices."""
        block = self.stride * self.count
        few = min(self.blocks, node // gcd(block, node))
        places = min(self.stride, node)
        return [number * block + place for number in range(few) for place in range(places)]

    def per_node(self, node: int) -> int:
        """Ranks of a group on each of its nodes, if all groups have several on several; else 1."""
        common = 0
        for start in self.starts(node):
            even = self.even_on_nodes(start, node)
            if even <= 1 or even == self.count or (common > 0 and even != common):
                return 1
            common = even
        return common

    def even_on_nodes(self, start: int, node: int) -> int:
        """Ranks of a group on each of its nodes; 0 for unequal numbers.

        The places of ranks on nodes repeat.
        """
        period = node // gcd(self.stride, node)
        seen = self.count if self.count <= 3 * period else 2 * period + self.count % period
        even, here, last = 0, 0, start // node
        for place in range(seen):
            at = (start + self.stride * place) // node
            if at != last:
                if even > 0 and here != even:
                    return 0
                even, here, last = here, 0, at
            here = here + 1
        return here if even in (0, here) else 0

    def counts_on_nodes(self, start: int, node: int) -> list[int]:
        """Ranks of a group on each of its nodes, node after node."""
        counts: list[int] = []
        here, last = 0, start // node
        for place in range(self.count):
            at = (start + self.stride * place) // node
            if at != last:
                counts.append(here)
                here, last = 0, at
            here = here + 1
        return [*counts, here]

    def num_nodes(self, node: int) -> int:
        """Number of nodes that hold ranks of the first group."""
        if self.stride >= node:
            return self.count
        return self.stride * (self.count - 1) // node + 1


def shard_groups(mesh: Mesh) -> StridedGroups:
    """Groups over which ZeRO cuts slices."""
    count = mesh.degree(*SHARD_AXES)
    return StridedGroups(blocks=mesh.num_workers // (count * mesh.tp), stride=mesh.tp, count=count)


def expert_groups(mesh: Mesh, pieces: int) -> StridedGroups:
    """Groups that hold all experts once, each in `pieces`; `ep` divides the ranks of a fold."""
    stride = 1 if pieces == 1 else mesh.tp
    return StridedGroups(
        blocks=mesh.num_workers // (mesh.ep * stride), stride=stride, count=mesh.ep
    )


def expert_shard_groups(mesh: Mesh, pieces: int) -> StridedGroups:
    """Groups over which ZeRO cuts experts, each in `pieces`: same experts, one replica."""
    fold = mesh.degree(*SHARD_AXES) * mesh.tp
    stride = mesh.ep * (1 if pieces == 1 else mesh.tp)
    return StridedGroups(blocks=mesh.num_workers // fold, stride=stride, count=fold // stride)
