# SPDX-License-Identifier: Apache-2.0
"""The head of a run's report: its model, mesh and choices, experts, servers and islands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from echelon.core.axis import MESH_AXES, SHARD_AXES
from echelon.core.choices.collective_algorithms import BACKEND, COLLECTIVE_ALGORITHMS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.experts import Balance
from echelon.core.model_shape import Experts
from echelon.core.parameters import num_active_parameters, parameters_text
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.local_sgd import outer_bytes, rejoin_bytes
from echelon.cost.bytes.sent import parameter_gather_tiers
from echelon.layout.context_work import attention_imbalance, attention_kernel_text

_LABEL = 9  # columns


def head_facts(plan: Plan, assumed: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield a word, and what is to be said of it: the run, its mesh, its choices."""
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
    yield "plan", f"{plan.name}  ({plan.content_hash()})"
    yield "model", f"{model.name}: {parameters_text(model)}, {shape}"
    yield "ranks", f"{ranks}, on {plan.cluster.name} over {plan.cluster.backend}"
    yield (
        "batch",
        f"{numbers.global_sequences} sequences x {numbers.sequence_length} tokens, "
        f"{plan.num_microbatches} microbatches of {layout.microbatch_sequences} on each data rank",
    )
    yield "update", _numbers(plan)
    yield from _choices(plan)
    if assumed:
        yield "assumed", "; ".join(assumed)


def _choices(plan: Plan) -> Iterator[tuple[str, str]]:
    layout = plan.layout
    if layout.zero.stage:
        yield "zero", _zero(plan)
    if plan.mesh.cp > 1:
        yield "context", _context(plan)
    if plan.cluster.backend == "nccl":
        yield "attends", attention_kernel_text(plan)
    yield from expert_facts(plan)
    if plan.mesh.servers:
        yield "servers", updates_text(plan)
    yield from island_facts(plan)
    if layout.kernels.fused:
        yield "kernels", f"{layout.kernels.provider}: {', '.join(layout.kernels.fused)}"
    elif plan.cluster.backend == "nccl":
        yield "kernels", "plain: PyTorch's operations, one after the other"
    if layout.collectives.algorithm != BACKEND:
        record = COLLECTIVE_ALGORITHMS[layout.collectives.algorithm]
        yield "sums", f"{record.name}: {record.sent}"


def fact_lines(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield facts as lines, each text behind its word."""
    return (f"{word:<{_LABEL}}{text}" for word, text in facts)


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


def count_text(count: int, what: str) -> str:
    """Return a number of things, one or more."""
    return f"{count} {what}{'s' * (count != 1)}"


def updates_text(plan: Plan) -> str:
    """Return when servers update."""
    updates, workers = plan.mathematics.updates, plan.mesh.num_workers
    if not updates.is_asynchronous:
        return "synchronous: one update with the mean of the global batch"
    if not updates.applies_each:
        return "asynchronous with max_staleness 0: the bits of synchronous servers"
    damping = f", rate / (1 + staleness)^{updates.damping:g}" * (updates.damping > 0)
    return (
        f"asynchronous: at most {updates.max_staleness} steps ahead of the slowest, so gradients "
        f"at most {updates.most_stale(workers)} updates stale{damping}"
    )


def expert_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what is to be said of experts, each below a word or below the one before."""
    experts, mesh = plan.model.experts, plan.mesh
    if experts is None:
        return
    yield "experts", _meets(experts)
    yield "", _where(plan, experts)
    if mesh.ep > 1:
        yield "", f"tokens travel {_travel(plan)}"
    yield "balance", _balance(plan, experts)


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


def island_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what becomes of lost islands, and what a meeting without one and a return take.

    Nothing where the first that is lost ends the run.
    """
    local = plan.mathematics.local_sgd
    if not local.is_elastic:
        return
    times = count_text(local.restarts, "time")
    again = f"each is started again up to {times}" if local.restarts else "none is started again"
    ends = local.every - 1
    fewer = sum(one.bytes for one in outer_bytes(plan, 0, ends, present=local.islands - 1))
    back = f", {decimal_bytes(rejoin_bytes(plan, 0))} to one that comes back" * (local.restarts > 0)
    yield (
        "islands",
        f"goes on with {local.min_islands} of {local.islands} islands, {again}; rank 0 "
        f"sends {decimal_bytes(fewer)} where one is missing at the end of a round{back}",
    )
