"""Where wrong and right ranks lie on the mesh: the axis that tells them apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from echelon.core.axis import DATA_AXES, LOSS_AXES, SHARD_AXES, Axis
from echelon.core.plan import Plan
from echelon.prove.diagnosis import Finding

Named = tuple[str, tuple[Axis, ...]]


def grouped_axes(plan: Plan) -> tuple[Named, ...]:
    """Return the axes over which things are summed, by name, the most telling first.

    What is summed over data ranks is summed over context ranks too: either may be at fault alone,
    or both together.
    """
    mesh = plan.mesh
    sliced: tuple[Named, ...] = ()
    if plan.layout.zero.stage:
        sliced = (
            *_with_context(plan, "dp_shard", (Axis.DP_SHARD,), SHARD_AXES),
            ("dp_replicate", (Axis.DP_REPLICATE,)),
        )
    summed = _with_context(plan, "dp", DATA_AXES, LOSS_AXES)
    context: tuple[Named, ...] = (("cp", (Axis.CP,)),) if mesh.cp > 1 else ()
    return (*context, *sliced, *summed, ("tp", (Axis.TP,)), ("pp", (Axis.PP,)))


def shard_axis(plan: Plan) -> str:
    """Return the name of what ZeRO cuts slices over."""
    return _with_context(plan, "dp_shard", (Axis.DP_SHARD,), SHARD_AXES)[-1][0]


def place_of(plan: Plan, rank: int, axes: tuple[Axis, ...]) -> int:
    """Return the position of `rank` in its group over `axes`."""
    return plan.mesh.group(rank, *axes).index(rank)


def telling_axis(
    plan: Plan, wrong: Collection[int], right: Iterable[int]
) -> tuple[str, list[int]] | None:
    """Return an axis along which wrong and right ranks have no place in common, and the wrong's."""
    right = set(right) - set(wrong)
    if not wrong or not right:
        return None
    for axis, members in grouped_axes(plan):
        places = [{place_of(plan, rank, members) for rank in ranks} for ranks in (wrong, right)]
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


def _with_context(
    plan: Plan, name: str, axes: tuple[Axis, ...], both: tuple[Axis, ...]
) -> tuple[Named, ...]:
    """Return an axis by itself and together with `cp`, as far as there are several ranks."""
    if plan.mesh.cp == 1:
        return ((name, axes),)
    if plan.mesh.degree(*axes) == 1:
        return (("cp", (Axis.CP,)),)
    return (name, axes), (f"{name} and cp", both)
