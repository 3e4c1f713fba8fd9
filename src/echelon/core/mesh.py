"""The mesh: ranks as points of a grid. Pure arithmetic, no processes, no torch.

`parallel/device_mesh.py` lowers a Mesh to process groups; nothing else turns ranks into groups.
Ranks are row-major over `MESH_AXES`, so `tp` neighbours are consecutive ranks (fast links) and
`pp` neighbours are farthest apart. The expert view folds `ep` over `dp_shard x cp` (x `tp`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from echelon.core.axis import MESH_AXES, Axis

Coordinates = Mapping[Axis, int]
_Cut = Callable[[tuple[int, ...], int], Iterable[tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Hold the degree of every axis; the world size is the product of all but `ep`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def degree(self, *axes: Axis) -> int:
        """Return the number of ranks in a group over `axes` (1 for no axis)."""
        return prod(getattr(self, axis.value) for axis in axes)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.degree(*MESH_AXES)

    @property
    def dp(self) -> int:
        """Return the number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return where `rank` sits on each axis of the mesh."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        result: dict[Axis, int] = {}
        for axis in reversed(MESH_AXES):
            rank, result[axis] = divmod(rank, self.degree(axis))
        return {axis: result[axis] for axis in MESH_AXES}

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank at `coordinates`; axes left out are 0."""
        rank = 0
        for axis in MESH_AXES:
            rank = rank * self.degree(axis) + coordinates.get(axis, 0)
        return rank

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axes` only, itself included, in order."""
        here = self.coordinates(rank)
        ordered = [axis for axis in MESH_AXES if axis in axes]
        return tuple(
            self.rank({**here, **dict(zip(ordered, point, strict=True))})
            for point in product(*(range(self.degree(axis)) for axis in ordered))
        )

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every group over `axes`; together they hold each rank exactly once."""
        groups: list[tuple[int, ...]] = []
        placed: set[int] = set()
        for rank in range(self.world_size):
            if rank not in placed:
                groups.append(self.group(rank, *axes))
                placed.update(groups[-1])
        return tuple(groups)

    def label(self, rank: int) -> str:
        """Return the coordinates that tell `rank` from others, such as ``pp1 tp0``."""
        here = self.coordinates(rank)
        names = [f"{axis.value}{here[axis]}" for axis in MESH_AXES if self.degree(axis) > 1]
        return " ".join(names) or "only rank"

    def groups_across_nodes(self, devices_per_node: int, *axes: Axis) -> int:
        """Return how many groups over `axes` have members on more than one node."""
        nodes = ({rank // devices_per_node for rank in group} for group in self.groups(*axes))
        return sum(len(node) > 1 for node in nodes)

    def crosses_nodes(self, devices_per_node: int, *axes: Axis) -> bool:
        """Return whether any group over `axes` must use links between nodes."""
        return self.groups_across_nodes(devices_per_node, *axes) > 0

    # The expert view: `ep` folded over the innermost ranks of dp_shard x cp (x tp).

    def expert_fold(self, *, expert_tp: int) -> tuple[Axis, ...]:
        """Return the axes that `ep` folds over: `tp` too where experts are not tensor-split."""
        if expert_tp == 1:
            return (Axis.DP_SHARD, Axis.CP, Axis.TP)
        return (Axis.DP_SHARD, Axis.CP)

    def expert_groups(self, *, expert_tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the groups that hold all experts once: `ep` consecutive ranks of each fold."""
        return self._fold(expert_tp, _chunks)

    def expert_index(self, rank: int, *, expert_tp: int = 1) -> int:
        """Return which of the `ep` shares of the experts `rank` holds."""
        return self.group(rank, *self.expert_fold(expert_tp=expert_tp)).index(rank) % self.ep

    def expert_shard_groups(self, *, expert_tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the groups over which ZeRO cuts experts: same experts, one replica."""
        return self._fold(expert_tp, _same_place)

    def expert_shard_degree(self, *, expert_tp: int = 1) -> int:
        """Return how many ranks of one replica hold the same experts."""
        return self.degree(*self.expert_fold(expert_tp=expert_tp)) // self.ep

    def expert_data_groups(self, *, expert_tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the groups whose ranks hold the same experts: their gradients are summed."""
        inner = self.expert_shard_groups(expert_tp=expert_tp)
        merged: dict[tuple[int, ...], None] = {}
        for members in inner:
            ranks: set[int] = set()
            for rank in members:
                ranks.update(self.group(rank, Axis.DP_REPLICATE))
            merged.setdefault(tuple(sorted(ranks)))
        return tuple(merged)

    def _fold(self, expert_tp: int, cut: _Cut) -> tuple[tuple[int, ...], ...]:
        axes = self.expert_fold(expert_tp=expert_tp)
        if self.degree(*axes) % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide {'x'.join(axes)}")
        return tuple(part for group in self.groups(*axes) for part in cut(group, self.ep))


def _chunks(group: tuple[int, ...], size: int) -> Iterable[tuple[int, ...]]:
    return (group[start : start + size] for start in range(0, len(group), size))


def _same_place(group: tuple[int, ...], ep: int) -> Iterable[tuple[int, ...]]:
    return (group[start::ep] for start in range(ep))
