# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that talk to one another, and the bytes that each sends in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.cluster import fast_domain
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.data import EXPERT_SHARD_WITHIN_AXIS, SHARD_WITHIN_AXIS
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.layout.data_groups import node_groups
from echelon.layout.muon import STAGE_AXES
from echelon.planner.predict.stage_rows import (
    StageRow,
    context_ranks_differ,
    place_head,
    sent_by_axis,
    stage_rows,
)
from echelon.planner.report.memory import run_places
from echelon.planner.view.document import BarRow, BarsFigure, DataTable, Section

MOST_MEMBERS = (8, 4, 2)  # ranks of a group
SENT_HEAD = (
    "Each rank sends per step (n ranks in the group, N tokens of a microbatch, D the hidden width, "
    "V the vocabulary, G the values of all buckets, s bytes of a value as it is sent):"
)

LETTERS = (
    "\nOf experts: m rows that a rank dispatches, k experts of a token, E experts, S rows that "
    "leave and R that arrive, g bytes of a gate; balanced: as if every expert got as many tokens "
    "as any other."
)

OTHER_ROUTE = 'Rows of experts are for balanced routing; experts.route = "{route}" sends otherwise.'

RankGroups = dict[str, tuple[tuple[int, ...], ...]]


def groups(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups of more than one rank, by axis; all that see other tokens are `dp`."""
    islands = plan.mathematics.local_sgd.active
    together = SHARD_AXES if islands else LOSS_AXES
    axes: dict[str, tuple[Axis, ...]] = {"pp": (Axis.PP,), "dp": together}
    if islands:
        axes |= {"dp_replicate": (Axis.DP_REPLICATE,)}
    if plan.layout.zero.stage:
        axes |= {"dp_shard": SHARD_AXES, "dp_replicate": (Axis.DP_REPLICATE,)}
    within = {SHARD_WITHIN_AXIS: False, EXPERT_SHARD_WITHIN_AXIS: True}
    nodes = {axis: node_groups(plan, expert=expert) for axis, expert in within.items()}
    axes |= {"cp": (Axis.CP,), "tp": (Axis.TP,)}
    if OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices:
        axes["stage"] = STAGE_AXES
    found = {
        name: plan.mesh.groups(*which)
        for name, which in axes.items()
        if plan.mesh.degree(*which) > 1
    }
    if plan.mesh.servers:
        found[SERVERS_AXIS] = (tuple(range(plan.mesh.world_size)),)
        found.pop("dp", None)  # One worker is no group.
    return found | expert_groups(plan) | {axis: ranks for axis, ranks in nodes.items() if ranks}


def expert_groups(plan: Plan) -> RankGroups:
    """Return the groups that exchange tokens, and those that hold the same experts."""
    if plan.model.experts is None:
        return {}
    mesh, pieces = plan.mesh, plan.layout.experts.expert_tp
    found: RankGroups = {
        "ep": mesh.expert_groups(expert_tp=pieces),
        "edp": mesh.expert_data_groups(expert_tp=pieces),
    }
    if plan.layout.experts.dispatch == "two-hop":
        found |= _hops(plan, found["ep"])
    if plan.layout.experts.zero_stage:
        found["edp_shard"] = mesh.expert_shard_groups(expert_tp=pieces)
    return {name: groups for name, groups in found.items() if len(groups[0]) > 1}


def _hops(plan: Plan, groups: tuple[tuple[int, ...], ...]) -> RankGroups:
    """Return the ranks with the same place on each node, and those of one node."""
    node = plan.cluster.devices_per_node
    by_node = [
        [tuple(ranks) for _, ranks in groupby(group, lambda rank: rank // node)] for group in groups
    ]
    return {
        "ep_across": tuple(across for parts in by_node for across in zip(*parts, strict=True)),
        "ep_within": tuple(part for parts in by_node for part in parts),
    }


def sent_sections(plan: Plan, runs: Sequence[Sequence[StageRow]]) -> Iterator[Section]:
    """Yield what each rank sends in a step: each message with its formula, then by axis."""
    if plan.mesh.world_size == 1:
        return
    place = place_head([row for run in runs for row in run])
    yield Section(
        id="messages",
        title="Messages of a step",
        summary=f"{SENT_HEAD}{_letters(plan)}",
        table=_messages(place, runs),
    )
    differ = context_ranks_differ(plan)
    yield Section(
        id="sent-by-axis",
        title="Bytes sent by axis",
        summary="That is, by axis:",
        table=_by_axis(place, runs),
        notes=(differ,) if differ else (),
    )


def _letters(plan: Plan) -> str:
    """Return what the letters of experts mean in the formulas of what is sent."""
    if plan.model.experts is None:
        return ""
    route = plan.mathematics.balance.route
    return LETTERS if route == "scores" else f"{LETTERS}\n{OTHER_ROUTE.format(route=route)}"


def _messages(place: str, runs: Sequence[Sequence[StageRow]]) -> DataTable:
    cells = [
        (run_places(run), term.axis, term.name, term.count, decimal_bytes(term.bytes), term.formula)
        for run in runs
        for term in run[0].sent
    ]
    return DataTable.of((place, "axis", "what", "times", "bytes", "each time"), cells)


def _by_axis(place: str, runs: Sequence[Sequence[StageRow]]) -> DataTable:
    axes = [*dict.fromkeys(axis for run in runs for axis in sent_by_axis(run[0]))]
    cells = [
        (run_places(run), *(decimal_bytes(sent_by_axis(run[0]).get(axis, 0)) for axis in axes))
        for run in runs
    ]
    return DataTable.of((place, *axes), cells)


def sent_figure(plan: Plan) -> Section:
    """Return bars of the bytes that a rank at each place sends in a step, by axis."""
    rows = stage_rows(plan)
    place = place_head(rows)
    by_row = {str(row.pp_rank): sent_by_axis(row) for row in rows}
    axes = list(dict.fromkeys(axis for sent in by_row.values() for axis in sent))
    counts = {name: [sent.get(axis, 0) for axis in axes] for name, sent in by_row.items()}
    most = max(map(sum, counts.values()), default=0)
    return Section(
        id="sent",
        title="What a rank sends in a step",
        summary=f"The rank that sends most sends {decimal_bytes(most)} in a step.",
        figure=BarsFigure(
            kinds=tuple(axes),
            rows=tuple(
                BarRow.of(f"{place} {name}", row, decimal_bytes) for name, row in counts.items()
            ),
        ),
        table=DataTable.of(
            (place, *axes, "bytes in all"),
            [(name, *(f"{count:,}" for count in (*row, sum(row)))) for name, row in counts.items()],
        ),
    )


def group_lines(plan: Plan, *, columns: int) -> Iterator[str]:
    """Yield the groups of each axis, as many as a line has room for, and how many cross nodes."""
    domain = fast_domain(plan.cluster)
    between = "nodes" if domain == plan.cluster.devices_per_node else "racks"
    for axis, found in groups(plan).items():
        across = sum(len({rank // domain for rank in group}) > 1 for group in found)
        links = f"  ({across} of {len(found)} between {between})" if across else ""
        room = columns - len(axis) - len(links)
        texts = [_fitting([_members(one, most) for one in found], room) for most in MOST_MEMBERS]
        yield f"{axis}{next((text for text in texts if len(text) <= room), texts[-1])}{links}"


def _fitting(texts: Sequence[str], room: int) -> str:
    """Return the first of some texts, as many as there is room for, and how many more there are."""
    text = ""
    for count in range(1, len(texts) + 1):
        more = f"  and {len(texts) - count} more" if count < len(texts) else ""
        longer = "".join(f"  {one}" for one in texts[:count]) + more
        if count > 1 and len(longer) > room:
            break
        text = longer
    return text


def _members(group: Sequence[int], most: int) -> str:
    names = [str(rank) for rank in group[:most]]
    if len(group) > most:
        names += ["...", str(group[-1])]
    return f"[{' '.join(names)}]"
