"""Where wrong and right ranks lie on the mesh: the axis that tells them apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.plan import Plan
from echelon.prove.diagnosis import Finding


def grouped_axes(plan: Plan) -> tuple[tuple[str, tuple[Axis, ...]], ...]:
    """Return the axes over which things are summed, by name, the most telling first."""
    sliced: tuple[tuple[str, tuple[Axis, ...]], ...] = ()
    if plan.layout.zero.stage:
        sliced = (("dp_shard", SHARD_AXES), ("dp_replicate", (Axis.DP_REPLICATE,)))
    return (*sliced, ("dp", LOSS_AXES), ("tp", (Axis.TP,)), ("pp", (Axis.PP,)))


def telling_axis(
    plan: Plan, wrong: Collection[int], right: Iterable[int]
) -> tuple[str, list[int]] | None:
    """Return an axis along which wrong and right ranks have no place in common, and the wrong's."""
    right = set(right) - set(wrong)
    if not wrong or not right:
        return None
    for axis, members in grouped_axes(plan):
        places = [{_place(plan, rank, members) for rank in ranks} for ranks in (wrong, right)]
        if not places[0] & places[1]:
            return axis, sorted(places[0])
    return None


def narrowed(plan: Plan, finding: Finding, wrong: Collection[int], right: Iterable[int]) -> Finding:
    """Return the finding with the axis that tells right and wrong ranks apart, if one does."""
    told = telling_axis(plan, wrong, right)
    if told is None:
        return finding
    axis, places = told
    says = f"only on {axis} {places}: {finding.says}"
    return replace(finding, says=says, axis=finding.axis or axis)


def _place(plan: Plan, rank: int, axes: tuple[Axis, ...]) -> int:
    """Return the position of `rank` in its group over `axes`."""
    return plan.mesh.group(rank, *axes).index(rank)
