# SPDX-License-Identifier: Apache-2.0
"""The mesh: ranks as points of a grid. Pure arithmetic, no processes, no torch.

`parallel/device_mesh.py` lowers a Mesh to process groups; nothing else turns ranks into
groups. Ranks are row-major over `MESH_AXES`, so `tp` neighbours are consecutive ranks (fast links)
and `pp` neighbours are farthest apart. The expert view folds `ep` over `dp_shard x cp` (x `tp`).

Where replicas are islands of local SGD, which meet seldom, `dp_replicate` is the outermost axis: an
island is a block of consecutive ranks, its pipeline included. Parameter servers are no points of
the grid: they are the ranks after it.

Groups of neighbouring axes lie on nodes by arithmetic (`StridedGroups`), without lists of ranks,
which may be long: the ranks of such a group are as far apart as there are ranks in the axes inside.
So `stride` groups of `count` ranks fill a block of the mesh, and each block is as the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Annotated

from echelon.core.axis import MESH_AXES, SHARD_AXES, Axis
from echelon.core.settings.configured import Configured
from echelon.core.settings.value_types import DEGREE, Integer

Coordinates = Mapping[Axis, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The degree of every axis, and the number of servers outside the grid.

    The grid has as many ranks as the product of all degrees but `ep`.
    """

    pp: Annotated[int, Configured("pipeline stages", DEGREE)] = 1
    dp_replicate: Annotated[int, Configured("replicas of the whole model", DEGREE)] = 1
    dp_shard: Annotated[int, Configured("data ranks that share out ZeRO's pieces", DEGREE)] = 1
    cp: Annotated[int, Configured("pieces of a sequence (context parallel)", DEGREE)] = 1
    tp: Annotated[int, Configured("pieces of a matrix (tensor parallel)", DEGREE)] = 1
    ep: Annotated[
        int, Configured("shares of the experts, folded over dp_shard x cp (x tp)", DEGREE)
    ] = 1
    replicas_outermost: bool = False
    servers: Annotated[
        int,
        Configured(
            "parameter servers beside the mesh: ranks that keep the model and update it",
            Integer(minimum=0, maximum=10_000),
            name="count",
            table="servers",
        ),
    ] = 0

    @property
    def order(self) -> tuple[Axis, ...]:
        """Return the axes over which ranks are row-major, outermost first."""
        if not self.replicas_outermost:
            return MESH_AXES
        others = (axis for axis in MESH_AXES if axis is not Axis.DP_REPLICATE)
        return (Axis.DP_REPLICATE, *others)

    def degree(self, *axes: Axis) -> int:
        """Return the number of ranks in a group over `axes` (1 for no axis)."""
        return prod(getattr(self, axis.value) for axis in axes)

    @property
    def num_workers(self) -> int:
        """Return the number of ranks of the grid: all but servers."""
        return self.degree(*MESH_AXES)

    @property
    def world_size(self) -> int:
        """Return the number of ranks, servers included."""
        return self.num_workers + self.servers

    @property
    def server_ranks(self) -> range:
        """Return the ranks that are parameter servers."""
        return range(self.num_workers, self.world_size)

    def is_server(self, rank: int) -> bool:
        """Return whether a rank is a parameter server."""
        return rank in self.server_ranks

    @property
    def dp(self) -> int:
        """Return the number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_text(self) -> str:
        """Return the data ranks as tables have them: ``8``, or ``2x4`` for 2 replicas of 4 shards.

        Eight shards, eight replicas and two replicas of four shards hold different things.
        """
        return "x".join(str(degree) for degree in self.data_degrees.values())

    @property
    def data_degrees(self) -> dict[str, int]:
        """Return what the data ranks are in a list of axes: dp, or dp_replicate and dp_shard."""
        if self.dp_replicate == 1 or self.dp_shard == 1:
            return {"dp": self.dp}
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return where `rank` sits on each axis of the mesh."""
        if not 0 <= rank < self.num_workers:
            raise IndexError(f"rank {rank} is outside a mesh of {self.num_workers} ranks")
        result: dict[Axis, int] = {}
        for axis in reversed(self.order):
            rank, result[axis] = divmod(rank, self.degree(axis))
        return {axis: result[axis] for axis in MESH_AXES}

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank at `coordinates`; axes left out are 0."""
        rank = 0
        for axis in self.order:
            rank = rank * self.degree(axis) + coordinates.get(axis, 0)
        return rank

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axes` only, itself included, in order."""
        here = self.coordinates(rank)
        first = self.rank({axis: here[axis] for axis in MESH_AXES if axis not in axes})
        return tuple(first + place for place in self._places(*axes))

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every group over `axes`; together they hold each rank exactly once."""
        places = self._places(*axes)
        others = (axis for axis in self.order if axis not in axes)
        return tuple(tuple(first + place for place in places) for first in self._places(*others))

    def _places(self, *axes: Axis) -> list[int]:
        """Return the ranks that sit anywhere on `axes` and at 0 of all others, in order."""
        found, stride = [0], 1
        for axis in reversed(self.order):
            degree = self.degree(axis)
            if axis in axes:
                steps = range(0, degree * stride, stride)
                found = [step + place for step in steps for place in found]
            stride *= degree
        return found

    def label(self, rank: int) -> str:
        """Return the coordinates that tell `rank` from others, such as ``pp1 tp0``."""
        if self.is_server(rank):
            return f"server{rank - self.num_workers}"
        here = self.coordinates(rank)
        names = [f"{axis.value}{here[axis]}" for axis in MESH_AXES if self.degree(axis) > 1]
        return " ".join(names) or "only rank"

    # The expert view: `ep` folded over the innermost ranks of dp_shard x cp (x tp).

    def expert_fold(self, *, expert_tp: int) -> tuple[Axis, ...]:
        """Return the axes that `ep` folds over: `tp` too where experts are not tensor-split."""
        return (*SHARD_AXES, Axis.TP) if expert_tp == 1 else SHARD_AXES

    def expert_groups(self, *, expert_tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the groups that hold all experts once: `ep` consecutive ranks of each fold."""
        return tuple(
            group[start : start + self.ep]
            for group in self._folds(expert_tp)
            for start in range(0, len(group), self.ep)
        )

    def expert_index(self, rank: int, *, expert_tp: int = 1) -> int:
        """Return which of the `ep` shares of the experts `rank` holds."""
        return self.group(rank, *self.expert_fold(expert_tp=expert_tp)).index(rank) % self.ep

    def expert_shard_groups(self, *, expert_tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the groups over which ZeRO cuts experts: same experts, one replica."""
        folds = self._folds(expert_tp)
        return tuple(group[start :: self.ep] for group in folds for start in range(self.ep))

    def expert_shard_degree(self, *, expert_tp: int = 1) -> int:
        """Return how many ranks of one replica hold the same experts."""
        return self.degree(*self.expert_fold(expert_tp=expert_tp)) // self.ep

    def expert_data_groups(self, *, expert_tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the groups whose ranks hold the same experts: their gradients are summed."""
        return _expert_data_groups(self, expert_tp)

    def _folds(self, expert_tp: int) -> tuple[tuple[int, ...], ...]:
        axes = self.expert_fold(expert_tp=expert_tp)
        if self.degree(*axes) % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide {'x'.join(axes)}")
        return self.groups(*axes)


@lru_cache(maxsize=4)
def _expert_data_groups(mesh: Mesh, expert_tp: int) -> tuple[tuple[int, ...], ...]:
    """Return `Mesh.expert_data_groups`, computed once: a second of work for 16,384 ranks."""
    merged = (
        {copy for rank in members for copy in mesh.group(rank, Axis.DP_REPLICATE)}
        for members in mesh.expert_shard_groups(expert_tp=expert_tp)
    )
    return tuple(dict.fromkeys(tuple(sorted(ranks)) for ranks in merged))


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
