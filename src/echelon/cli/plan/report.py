# SPDX-License-Identifier: Apache-2.0
"""What `echelon plan` shows of a plan: what each rank holds, who talks to whom, and how much.

Every number is read from `cost/` and `schedule/`; nothing is computed here but sums.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from echelon.cli.plan.experts import expert_groups, expert_lines, experts_json, sent_letters
from echelon.cli.plan.islands import island_lines
from echelon.cli.plan.memory import memory_parts, run_places
from echelon.cli.plan.pipeline import pipeline_json, pipeline_parts
from echelon.cli.plan.servers import count_text, server_parts, servers_json, updates_text
from echelon.core.axis import LOSS_AXES, MESH_AXES, SHARD_AXES, Axis
from echelon.core.choices.collective_algorithms import BACKEND, COLLECTIVE_ALGORITHMS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.cluster import fast_domain
from echelon.core.parameters import num_parameters, parameters_text
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.data import EXPERT_SHARD_WITHIN_AXIS, SHARD_WITHIN_AXIS
from echelon.cost.bytes.sent import parameter_gather_tiers
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.cost.bytes.terms import Pool
from echelon.cost.seconds.unit_times import UnitTimes, unit_times_from_formulas
from echelon.layout.context_work import attention_imbalance, attention_kernel_text, scores_by_rank
from echelon.layout.data_groups import node_groups
from echelon.layout.muon import STAGE_AXES
from echelon.planner.answer.estimate import estimate_json, rate_lines, terms_beside
from echelon.planner.lint.checks import lint, lint_rows, plan_fits, why_not_fit
from echelon.planner.lint.memory import DOES_NOT_FIT
from echelon.planner.predict.estimate import estimate_plan
from echelon.planner.predict.stage_rows import (
    StageRow,
    context_ranks_differ,
    group_equal_rows,
    most_held_bytes,
    most_step_bytes,
    place_head,
    pool_bytes,
    sent_by_axis,
    stage_rows,
)
from echelon.planner.view.text_layout import WIDTH, fill_text, fit_page, table

MOST_MEMBERS = (8, 4, 2)  # ranks of a group
MOST_NOTES = 4  # notes

SENT_HEAD = (
    "Each rank sends per step (n ranks in the group, N tokens of a microbatch, D the hidden width, "
    "V the vocabulary, G the values of all buckets, s bytes of a value as it is sent):"
)


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


def plan_json(
    plan: Plan, times: UnitTimes | None = None, assumed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the plan and its report as JSON values; `assumed` lists defaults."""
    rows = stage_rows(plan)
    memory = plan.cluster.device.memory_bytes
    return {
        "plan": json.loads(plan.to_json()),
        "hash": plan.content_hash(),
        "num_parameters": num_parameters(plan.model),
        "assumed": [*plan.model.assumed, *assumed],
        "num_microbatches": plan.num_microbatches,
        "fits": plan_fits(plan),
        "held_bytes_fit": most_held_bytes(plan, rows) <= memory,
        "step_bytes_fit": most_step_bytes(plan, rows) <= memory,
        "context": _context_json(plan),
        "experts": experts_json(plan),
        "stages": [_row_json(row) for row in rows],
        "servers": servers_json(plan),
        "estimate": estimate_json(estimate_plan(plan, times)),
        "pipeline": pipeline_json(plan, times or unit_times_from_formulas(plan)),
        "notes": [asdict(finding) for finding in lint(plan)],
        "groups": {axis: [list(group) for group in found] for axis, found in groups(plan).items()},
    }


def _context_json(plan: Plan) -> dict[str, Any] | None:
    if plan.mesh.cp == 1:
        return None
    return {
        "degree": plan.mesh.cp,
        "kind": plan.layout.context.kind,
        "ulysses_degree": plan.layout.context.ulysses_degree,
        "ring_degree": plan.placement.ring_degree,
        "positions_per_rank": plan.mathematics.sequence_length // plan.mesh.cp,
        "scores_by_rank": list(scores_by_rank(plan)),
        "imbalance": attention_imbalance(plan),
    }


def _row_json(row: StageRow) -> dict[str, Any]:
    pools: list[Pool] = [*dict.fromkeys(term.pool for term in row.held)]
    return {
        "pp_rank": row.pp_rank,
        "stages": list(row.stages),
        "ranks": list(row.ranks),
        "blocks": list(row.blocks),
        "held": [asdict(term) for term in row.held],
        "held_bytes_by_pool": {pool: pool_bytes(row.held, pool) for pool in pools},
        "held_in_a_step_at_most": [asdict(term) for term in row.step],
        "sent_bytes_per_step": [{**asdict(term), "bytes": term.bytes} for term in row.sent],
        "sent_bytes_by_axis": sent_by_axis(row),
        "muon_bytes_by_rank": {str(rank): sent for rank, sent in row.muon.items()},
        "choices": [asdict(choice) for choice in row.choices],
    }


def plan_text(
    plan: Plan,
    times: UnitTimes | None = None,
    found: str = "",
    assumed: Sequence[str] = (),
    *,
    columns: int = WIDTH,
) -> str:
    """Return the plan as the page that a person reads; a plan that does not fit begins with that.

    Stages last as `times` say, or as modelled without them; `found` is the note of a
    search, `assumed` lists defaults that nobody set.
    """
    rows = stage_rows(plan)
    place = place_head(rows)
    runs = group_equal_rows(rows)
    takes = estimate_plan(plan, times)
    wrong = why_not_fit(plan)
    lines = [*_head(plan), *_taken(assumed, columns), *rate_lines(takes, label=9, columns=columns)]
    parts = [fill_text(wrong, rest="  ", columns=columns)] if wrong else []
    parts += ["\n".join(lines), *_assumed(plan, columns=columns)]
    parts += memory_parts(plan, rows, runs, columns=columns)
    parts += server_parts(plan, columns=columns)
    if plan.mesh.world_size > 1:
        parts.append(
            "Ranks that talk to one another:\n\n" + "\n".join(_group_lines(plan, columns=columns))
        )
        parts.append(f"{SENT_HEAD}{sent_letters(plan)}\n\n{_sent(place, runs, columns=columns)}")
        parts.append(f"That is, by axis:\n\n{_sent_by_axis(place, runs, columns=columns)}")
        if differ := context_ranks_differ(plan):
            parts.append(differ)
    if plan.num_stages > 1:
        parts.extend(
            pipeline_parts(plan, times or unit_times_from_formulas(plan), found, columns=columns)
        )
    parts.append(
        "A step takes, and its fullest rank holds, activations included:\n\n"
        f"{terms_beside(takes, plan.cluster.device.memory_bytes, columns=columns)}"
    )
    if notes := lint_rows(plan, columns, most=MOST_NOTES, without=(DOES_NOT_FIT,)):
        parts.append("Notes (`echelon explain ID` says more):\n\n" + "\n".join(notes))
    return fit_page("\n\n".join(parts), columns=columns) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    model, numbers, layout = plan.model, plan.mathematics, plan.layout
    shape = f"{model.layers} blocks x {model.hidden} wide, {model.heads} heads"
    if model.kv_heads != model.heads:
        shape += f" ({model.kv_heads} key/value)"
    used = [axis for axis in MESH_AXES if plan.mesh.degree(axis) > 1]
    degrees = " x ".join(f"{axis} {plan.mesh.degree(axis)}" for axis in used)
    if plan.mesh.servers:
        degrees = f"{degrees or plan.mesh.num_workers} + {count_text(plan.mesh.servers, 'server')}"
    ranks = f"{plan.mesh.world_size}" + (f" = {degrees}" if degrees else "")
    if layout.sequence_parallel:
        ranks += ", sequence parallel"
    if layout.tp_overlap != "none":
        how = "a ring" if layout.tp_overlap == "ring" else "symmetric memory"
        ranks += f", products overlap over {how}"
    yield f"plan     {plan.name}  ({plan.content_hash()})"
    yield f"model    {model.name}: {parameters_text(model)}, {shape}"
    yield f"ranks    {ranks}, on {plan.cluster.name} over {plan.cluster.backend}"
    yield (
        f"batch    {numbers.global_sequences} sequences x {numbers.sequence_length} tokens, "
        f"{plan.num_microbatches} microbatches of {layout.microbatch_sequences} on each data rank"
    )
    yield f"update   {_numbers(plan)}"
    if layout.zero.stage:
        yield f"zero     {_zero(plan)}"
    if plan.mesh.cp > 1:
        yield f"context  {_context(plan)}"
    if plan.cluster.backend == "nccl":
        yield f"attends  {attention_kernel_text(plan)}"
    yield from expert_lines(plan)
    if plan.mesh.servers:
        yield f"servers  {updates_text(plan)}"
    yield from island_lines(plan)
    if layout.kernels.fused:
        yield f"kernels  {layout.kernels.provider}: {', '.join(layout.kernels.fused)}"
    elif plan.cluster.backend == "nccl":
        yield "kernels  plain: PyTorch's operations, one after the other"
    if layout.collectives.algorithm != BACKEND:
        record = COLLECTIVE_ALGORITHMS[layout.collectives.algorithm]
        yield f"sums     {record.name}: {record.sent}"


def _taken(assumed: Sequence[str], columns: int) -> Iterator[str]:
    """Yield the line of defaults that nobody set."""
    if assumed:
        yield fill_text(f"assumed  {'; '.join(assumed)}", rest=" " * 9, columns=columns)


def _assumed(plan: Plan, *, columns: int) -> Iterator[str]:
    """Yield what is taken to be so of a model whose architecture is not known."""
    if plan.model.assumed:
        said = "and its user has said yes to that" if plan.model.assume else "and may be otherwise"
        rows = (fill_text(f"  {one}", rest="    ", columns=columns) for one in plan.model.assumed)
        yield f"Assumed of {plan.model.name}, {said}:\n\n" + "\n".join(rows)


def _numbers(plan: Plan) -> str:
    precision = plan.mathematics.precision
    kinds = {
        "parameters": precision.parameters,
        "gradients": precision.gradients,
        "their sums": precision.reduction,
        "optimizer": precision.master,
    }
    optimizer = OPTIMIZERS[plan.mathematics.optimizer.kind].title
    products = f", products of blocks fp8 in tiles of {precision.fp8_block}" * precision.is_fp8
    if precision.int8_block:
        products += f", matrices rounded to int8 in blocks of {precision.int8_block}"
    if len(set(kinds.values())) == 1:
        return f"{optimizer}, all in {precision.master}{products}"
    listed = ", ".join(f"{name} {dtype}" for name, dtype in kinds.items())
    return f"{optimizer}, {listed}{products}"


def _zero(plan: Plan) -> str:
    zero, degree = plan.layout.zero, plan.mesh.degree(*SHARD_AXES)
    text = f"stage {zero.stage}, slices of 1/{degree}, gradients of microbatches add up "
    text += "in slices" if zero.accumulate == "slices" else "whole"
    if zero.stage == 3:
        kept = "freed after forward" if zero.reshard_after_forward else "kept until the step ends"
        text += f", units {kept}"
    if zero.reduce != "exact":
        text += f", summed as {zero.reduce} in nodes and across them"
    if zero.secondary:
        near, far = parameter_gather_tiers(plan, 0)
        text += (
            f", secondary slices in nodes: rank 0 gathers with {decimal_bytes(near)} sent inside "
            f"of its node, {decimal_bytes(far)} to others"
        )
    return text


def _context(plan: Plan) -> str:
    """Return how context ranks meet, what each holds, and how unequal their attention is."""
    context, cp = plan.layout.context, plan.mesh.cp
    text = f"{context.kind} over cp {cp}"
    if context.record.exchange == "inner":
        degree = context.ulysses_degree
        text += f" = ulysses {degree} x ring {cp // degree}"
    text += f", {plan.mathematics.sequence_length // cp} positions on each rank"
    uneven = f"{text}, attention uneven by {100 * attention_imbalance(plan):.2f} %"
    apart = plan.mathematics.documents == "separate"
    return f"{uneven} (more in sequences of several documents)" if apart else uneven


def _sent(place: str, runs: Sequence[Sequence[StageRow]], *, columns: int) -> str:
    cells = [
        (run_places(run), term.axis, term.name, term.count, decimal_bytes(term.bytes), term.formula)
        for run in runs
        for term in run[0].sent
    ]
    return table((place, "axis", "what", "times", "bytes", "each time"), cells, columns)


def _sent_by_axis(place: str, runs: Sequence[Sequence[StageRow]], *, columns: int) -> str:
    axes = [*dict.fromkeys(axis for run in runs for axis in sent_by_axis(run[0]))]
    cells = [
        (run_places(run), *(decimal_bytes(sent_by_axis(run[0]).get(axis, 0)) for axis in axes))
        for run in runs
    ]
    return table((place, *axes), cells, columns)


def _group_lines(plan: Plan, *, columns: int) -> Iterator[str]:
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
