# SPDX-License-Identifier: Apache-2.0
"""What `echelon plan` shows of experts: where they are, how tokens travel, what evens the load."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts
from echelon.core.parameters import num_active_parameters
from echelon.core.plan import Plan

LETTERS = (
    "\nOf experts: m rows that a rank dispatches, k experts of a token, E experts, S rows that "
    "leave and R that arrive, g bytes of a gate; balanced: as if every expert got as many tokens "
    "as any other."
)

OTHER_ROUTE = 'Rows of experts are for balanced routing; experts.route = "{route}" sends otherwise.'

RankGroups = dict[str, tuple[tuple[int, ...], ...]]


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


def sent_letters(plan: Plan) -> str:
    """Return what the letters of experts mean in the formulas of what is sent."""
    if plan.model.experts is None:
        return ""
    route = plan.mathematics.balance.route
    return LETTERS if route == "scores" else f"{LETTERS}\n{OTHER_ROUTE.format(route=route)}"


def expert_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of the head of a plan with experts."""
    experts, mesh = plan.model.experts, plan.mesh
    if experts is None:
        return
    yield f"experts  {_meets(experts)}"
    yield f"         {_where(plan, experts)}"
    if mesh.ep > 1:
        yield f"         tokens travel {_travel(plan)}"
    yield f"balance  {_balance(plan, experts)}"


def experts_json(plan: Plan) -> dict[str, Any] | None:
    """Return what there is to say of experts as JSON values; None for a dense model."""
    experts, layout, mesh = plan.model.experts, plan.layout.experts, plan.mesh
    if experts is None:
        return None
    return {
        "num_active_parameters": num_active_parameters(plan.model),
        "ep": mesh.ep,
        "experts_per_rank": experts.num_experts // mesh.ep,
        "expert_tp": layout.expert_tp,
        "zero_stage": layout.zero_stage,
        "ranks_with_the_same_experts": _copies(plan),
        "capacity": _capacity(plan, experts),
    }


def _copies(plan: Plan) -> int:
    return len(plan.mesh.expert_data_groups(expert_tp=plan.layout.experts.expert_tp)[0])


def _capacity(plan: Plan, experts: Experts) -> int | None:
    numbers = plan.mathematics
    return numbers.balance.capacity(numbers.sequence_length, experts.num_experts, experts.top_k)


def _meets(experts: Experts) -> str:
    text = f"{experts.num_experts} to a block, a token meets {experts.top_k}"
    if experts.groups > 1:
        text += f" out of the best {experts.top_groups} of {experts.groups} groups"
    if experts.shared_experts:
        text += f", and {experts.shared_experts} shared"
    return text


def _where(plan: Plan, experts: Experts) -> str:
    layout, mesh, copies = plan.layout.experts, plan.mesh, _copies(plan)
    pieces = "whole" if layout.expert_tp == 1 else f"each in {layout.expert_tp} pieces"
    text = f"ep {mesh.ep}: {experts.num_experts // mesh.ep} on a rank, {pieces}"
    text += f", the same on {copies} ranks" if copies > 1 else ", and on no other"
    if layout.zero_stage:
        degree = mesh.expert_shard_degree(expert_tp=layout.expert_tp)
        text += f"; ZeRO stage {layout.zero_stage}"
        text += f", slices of 1/{degree}" if degree > 1 else " has nothing of them to share out"
    return text


def _travel(plan: Plan) -> str:
    layout = plan.layout.experts
    text = (
        "in two hops" if layout.dispatch == "two-hop" else "straight to the ranks of their experts"
    )
    if layout.chunks > 1:
        text += f", in {layout.chunks} chunks"
    return f"{text}, padded" if layout.padded else text


def _balance(plan: Plan, experts: Experts) -> str:
    balance = plan.mathematics.balance
    parts = list(_evens(balance))
    room = _capacity(plan, experts)
    if room is None:
        parts.append("dropless")
    else:
        lost = "later tokens" if balance.drop == "position" else "lower scores"
        parts.append(f"room for {room} tokens of a sequence, {lost} are dropped")
    if balance.route != "scores":
        parts.append(f'tokens go where route = "{balance.route}" says, not where scores do')
    return "; ".join(parts)


def _evens(balance: Balance) -> Iterator[str]:
    if balance.has_aux:
        scope = {"global": "the global batch", "sequence": "each sequence"}
        over = scope.get(balance.aux_over, "each microbatch, so that its size changes the numbers")
        yield f"auxiliary loss x {balance.aux_coefficient:g} over {over}"
    if balance.has_bias:
        yield f"bias moves by {balance.bias_rate:g} a step"
    if not balance.has_aux and not balance.has_bias:
        yield "nothing evens the load"
    if balance.z_coefficient:
        yield f"z-loss x {balance.z_coefficient:g}"
