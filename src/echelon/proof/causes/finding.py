# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis says: the first wrong thing, its factor, and the axis that it points to.

The axis is the one along which wrong and right ranks have no place in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace

from echelon.core.axis import DATA_AXES, LOSS_AXES, SHARD_AXES, Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.servers import SERVERS_AXIS

ROUNDING = "right but for rounding"


@dataclass(frozen=True, slots=True)
class ProofFinding:
    """Name what an error looks like.

    `factor` is a word ("2", "1/dp", "token ratio", "sign", "zero", "missing sum", ...), `value`
    the number behind it where there is one, `axis` the axis that it points to ("" for none),
    `residual` what the explanation leaves unexplained, relative. `tensor` is what it is told under
    ("" for what was compared), `ranks` are those that have it wrong, where they are known.
    """

    factor: str
    description: str
    axis: str = ""
    _: KW_ONLY
    value: float | None = None
    residual: float = 0.0
    tensor: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Name the first wrong thing of a failed proof."""

    rule: str
    """Id of the rule that explains it."""
    step: int
    """The optimizer step."""
    tensor: str
    """Canonical name of the tensor; "" for a number."""
    where: str
    """Where the tensor is in the model, and how it is split."""
    factor: str
    """The factor by which it is, in words."""
    axis: str
    """The axis of the mesh that this points at."""
    value: float | None
    """The factor as a number, if there is one."""
    says: str
    """The sentence that users read."""
    residual: float
    """What is left where the factor is taken out, relative."""
    ranks: tuple[int, ...]
    """Ranks that have it wrong."""
    num_wrong: int
    """Tensors or numbers that are wrong."""
    num_compared: int
    """Tensors or numbers that were compared."""

    def sentence(self) -> str:
        """Return the diagnosis as one sentence."""
        axis = f" [axis {self.axis}]" if self.axis else ""
        place = f"{self.tensor} ({self.where})" if self.where else self.tensor
        return f"first wrong: {place}: {self.says}{axis}"


NamedAxes = tuple[str, tuple[Axis, ...]]

RankLists = tuple[tuple[int, ...], ...]


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


def distinguishing_axis(
    plan: Plan, wrong: Collection[int], right: Iterable[int], *, expert: bool = False
) -> tuple[str, list[int]] | None:
    """Return an axis along which wrong and right ranks have no place in common, and the wrong's."""
    right = set(right) - set(wrong)
    if not wrong or not right:
        return None
    for axis, groups in named_groups(plan, expert=expert):
        places = [{group_of(groups, r).index(r) for r in ranks} for ranks in (wrong, right)]
        if not places[0] & places[1]:
            return axis, sorted(places[0])
    return None


def with_distinguishing_axis(
    plan: Plan,
    finding: ProofFinding,
    wrong: Collection[int],
    right: Iterable[int],
    *,
    expert: bool = False,
) -> ProofFinding:
    """Return the finding with the axis that tells right and wrong ranks apart, if one does."""
    told = distinguishing_axis(plan, wrong, right, expert=expert)
    if told is None:
        return finding
    axis, places = told
    says = f"only on {axis} {places}: {finding.description}"
    return replace(finding, description=says, axis=finding.axis or axis)


def _with_context(
    plan: Plan, name: str, axes: tuple[Axis, ...], both: tuple[Axis, ...]
) -> tuple[NamedAxes, ...]:
    """Return an axis by itself and together with `cp`, as far as there are several ranks."""
    if plan.mesh.cp == 1:
        return ((name, axes),)
    if plan.mesh.degree(*axes) == 1:
        return (("cp", (Axis.CP,)),)
    return (name, axes), (f"{name} and cp", both)
