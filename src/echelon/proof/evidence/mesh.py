# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: along axes by the user's names, and those of a plan that share something."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from echelon.core.axis import DATA_AXES, LOSS_AXES, SHARD_AXES, Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.servers import SERVERS_AXIS


@dataclass(frozen=True, slots=True)
class NamedMesh:
    """Hold the degrees of the axes by name, outermost first."""

    degrees: Mapping[str, int]

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes that split anything."""
        return tuple(axis for axis, degree in self.degrees.items() if degree > 1)

    def __str__(self) -> str:
        """Return the mesh as users read it."""
        return " x ".join(f"{axis}{self.degrees[axis]}" for axis in self.axes) or "1"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank is on each axis; the last axis varies fastest."""
        found: dict[str, int] = {}
        for axis in reversed(tuple(self.degrees)):
            rank, found[axis] = divmod(rank, self.degrees[axis])
        return {axis: found[axis] for axis in self.degrees}

    def label(self, rank: int) -> str:
        """Return the coordinates of a rank as text."""
        here = self.coordinates(rank)
        return " ".join(f"{axis}{here[axis]}" for axis in self.axes)

    def degree(self, axes: Sequence[str]) -> int:
        """Return the number of ranks along several axes together."""
        return math.prod(self.degrees[axis] for axis in axes)

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Return the place of a rank along several axes together, the last one fastest."""
        here, place = self.coordinates(rank), 0
        for axis in axes:
            place = place * self.degrees[axis] + here[axis]
        return place

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` in these axes only, in rising order."""
        here = self.coordinates(rank)
        fixed = {axis: place for axis, place in here.items() if axis not in axes}
        return tuple(
            other
            for other in range(self.world_size)
            if all(self.coordinates(other)[axis] == place for axis, place in fixed.items())
        )

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks along these axes."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in range(self.world_size)))

    def axis_sets(self) -> Iterator[tuple[str, ...]]:
        """Yield every set of axes that split anything, small ones first."""
        for count in range(1, len(self.axes) + 1):
            yield from combinations(self.axes, count)


NamedAxes = tuple[str, tuple[Axis, ...]]

RankLists = tuple[tuple[int, ...], ...]

AxisGroups = Iterable[tuple[str, RankLists]]
"""Groups of ranks that share something, by the name of their axis."""


def named_groups(plan: Plan, *, expert: bool = False) -> Iterator[tuple[str, RankLists]]:
    """Yield the groups of ranks that share something, by the name of their axis.

    They are those of `grouped_axes`; of routed experts the ranks that hold the same experts come
    first, then those that hold all of them together.
    """
    mesh = plan.mesh
    if expert:
        expert_tp = plan.layout.experts.expert_tp
        if plan.layout.experts.zero_stage:
            yield "edp_shard", mesh.expert_shard_groups(expert_tp=expert_tp)
            yield "dp_replicate", mesh.groups(Axis.DP_REPLICATE)
        yield "edp", mesh.expert_data_groups(expert_tp=expert_tp)
        yield "ep", mesh.expert_groups(expert_tp=expert_tp)
        if expert_tp > 1:
            yield "tp", mesh.groups(Axis.TP)
        yield "pp", mesh.groups(Axis.PP)
        return
    servers = tuple(mesh.server_ranks)
    if servers:
        yield SERVERS_AXIS, (servers, *((rank,) for rank in range(mesh.num_workers)))
    for axis, members in grouped_axes(plan):
        yield axis, (*mesh.groups(*members), *((rank,) for rank in servers))


def group_of(groups: RankLists, rank: int) -> tuple[int, ...]:
    """Return the group that `rank` is in."""
    return next(group for group in groups if rank in group)


def grouped_axes(plan: Plan) -> tuple[NamedAxes, ...]:
    """Return the axes over which things are summed, by name, the most telling first.

    What is summed over data ranks is summed over context ranks too: either may be at fault alone,
    or both together.
    """
    mesh = plan.mesh
    sliced: tuple[NamedAxes, ...] = ()
    if plan.layout.zero.stage:
        sliced = (
            *_with_context(plan, "dp_shard", (Axis.DP_SHARD,), SHARD_AXES),
            ("dp_replicate", (Axis.DP_REPLICATE,)),
        )
    summed = _with_context(plan, "dp", DATA_AXES, LOSS_AXES)
    context: tuple[NamedAxes, ...] = (("cp", (Axis.CP,)),) if mesh.cp > 1 else ()
    return (*context, *sliced, *summed, ("tp", (Axis.TP,)), ("pp", (Axis.PP,)))


def shard_axis(plan: Plan) -> str:
    """Return the name of what ZeRO cuts slices over."""
    return _with_context(plan, "dp_shard", (Axis.DP_SHARD,), SHARD_AXES)[-1][0]


def index_in_group(plan: Plan, rank: int, axes: tuple[Axis, ...]) -> int:
    """Return the position of `rank` in its group over `axes`."""
    return plan.mesh.group(rank, *axes).index(rank)


def _with_context(
    plan: Plan, name: str, axes: tuple[Axis, ...], both: tuple[Axis, ...]
) -> tuple[NamedAxes, ...]:
    """Return an axis by itself and together with `cp`, as far as there are several ranks."""
    if plan.mesh.cp == 1:
        return ((name, axes),)
    if plan.mesh.degree(*axes) == 1:
        return (("cp", (Axis.CP,)),)
    return (name, axes), (f"{name} and cp", both)
