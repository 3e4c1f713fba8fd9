"""Where wrong and right ranks lie on the mesh: the axis that tells them apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from echelon.core.axis import DATA_AXES, LOSS_AXES, SHARD_AXES, Axis
from echelon.core.plan import Plan
from echelon.prove.diagnosis import Finding

Named = tuple[str, tuple[Axis, ...]]

Groups = tuple[tuple[int, ...], ...]


def telling_groups(plan: Plan, *, expert: bool = False) -> Iterator[tuple[str, Groups]]:
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
    for axis, members in grouped_axes(plan):
        yield axis, mesh.groups(*members)


def group_of(groups: Groups, rank: int) -> tuple[int, ...]:
    """Return the group that `rank` is in."""
    return next(group for group in groups if rank in group)


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
    plan: Plan, wrong: Collection[int], right: Iterable[int], *, expert: bool = False
) -> tuple[str, list[int]] | None:
    """Return an axis along which wrong and right ranks have no place in common, and the wrong's."""
    right = set(right) - set(wrong)
    if not wrong or not right:
        return None
    for axis, groups in telling_groups(plan, expert=expert):
        places = [{group_of(groups, r).index(r) for r in ranks} for ranks in (wrong, right)]
        if not places[0] & places[1]:
            return axis, sorted(places[0])
    return None


def narrowed(
    plan: Plan,
    finding: Finding,
    wrong: Collection[int],
    right: Iterable[int],
    *,
    expert: bool = False,
) -> Finding:
    """Return the finding with the axis that tells right and wrong ranks apart, if one does."""
    told = telling_axis(plan, wrong, right, expert=expert)
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
