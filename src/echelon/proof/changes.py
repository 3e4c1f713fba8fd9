# SPDX-License-Identifier: Apache-2.0
"""Numbers of a plan that a proof changes, and divisions that it must not mend on the way.

A proof runs a small plan in the place of the given plan. A number must divide another in both or in
neither: otherwise a split without a remainder would prove a split with one. The arithmetic does not
ask `config/rules`: a rule that is missing there would be missing here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from math import lcm
from typing import Any

from echelon.core.errors import ConfigError
from echelon.core.experts import unrounded_capacity
from echelon.core.plan import Plan
from echelon.core.rulebook.prove import PROVE_REPAIRS_NOTHING
from echelon.schedule.build import SCHEDULES
from echelon.schedule.from_plan import coverage_problem

_NAMES = frozenset({"model.name", "zero.offload_dir"})
"""Fields that take no part in the computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A number that a proof changed."""

    name: str
    """The field of the plan, such as ``model.hidden``."""
    given: object
    """Its value in the given plan."""
    proven: object
    """Its value in the plan that ran."""


def changes(given: Plan, proven: Plan) -> tuple[Change, ...]:
    """Return every field of the mathematics and of the layout that two plans do not share."""
    pairs = ((given.mathematics, proven.mathematics), (given.layout, proven.layout))
    return tuple(change for pair in pairs for change in _changes("", *pair))


def _changes(name: str, given: Any, proven: Any) -> Iterator[Change]:
    if is_dataclass(given) and type(given) is type(proven):
        for field in fields(given):
            inner = f"{name}.{field.name}".removeprefix(".")
            yield from _changes(inner, getattr(given, field.name), getattr(proven, field.name))
    elif given != proven and name not in _NAMES:
        yield Change(name=name, given=given, proven=proven)


def require_nothing_mended(given: Plan, proven: Plan) -> None:
    """Raise ConfigError where something divides, or fits, in only one of two plans."""
    before, after = relations(given), relations(proven)
    mended = [
        PROVE_REPAIRS_NOTHING.problem(
            f"{relation.name}: {relation.text} in {given.name}, and {small.text} in the small plan "
            "that would be proven in its place",
            suggestions=(f"a plan in which {relation.name}",),
        )
        for relation, small in zip(before, after, strict=True)
        if relation.holds != small.holds
    ]
    if mended:
        raise ConfigError(mended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A relation between numbers of a plan, such as a division without remainder."""

    name: str
    """The relation in words; the same in every plan of the same parts."""
    text: str
    """Its numbers."""
    holds: bool
    """True if the numbers have it."""


def relations(plan: Plan) -> tuple[Relation, ...]:
    """Return every relation that a plan with the parts of this one needs for an even split."""
    return (*_divisions(plan), *_orders(plan))


def _divisions(plan: Plan) -> Iterator[Relation]:
    for name, divisor_name, number, divisor in (
        *_of_heads(plan),
        *_inner_widths(plan),
        *_of_blocks(plan),
        *_of_tokens(plan),
        *_of_experts(plan),
    ):
        remainder = number % divisor if divisor > 0 else number
        text = f"{number} % {divisor} = {remainder}"
        yield Relation(name=f"{divisor_name} divides {name}", text=text, holds=not remainder)


_Division = tuple[str, str, int, int]
"""Names of a number and of its divisor, and both."""


def _of_heads(plan: Plan) -> Iterator[_Division]:
    model, tp, context = plan.model, plan.mesh.tp, plan.layout.context
    yield "heads", "kv_heads", model.heads, model.kv_heads
    yield "heads", "tp", model.heads, tp
    yield "kv_heads", "tp", model.kv_heads, tp
    yield "heads / tp", "the degree of Ulysses", model.heads // tp, context.ulysses_degree
    if model.positions == "rope":
        width = model.head_dim if model.latent is None else model.latent.rope_dim
        yield "the width of a head", "2", width, 2


def _inner_widths(plan: Plan) -> Iterator[_Division]:
    """Yield the inner widths of MLPs, and the number of ranks that cut each."""
    model, tp = plan.model, plan.mesh.tp
    experts = model.experts
    if experts is None or experts.first_dense_layers:
        yield "ffn", "tp", model.ffn, tp
    if experts is not None:
        yield "experts.ffn", "expert_tp", experts.ffn, plan.layout.experts.expert_tp
        if experts.shared_experts:
            width = experts.shared_experts * experts.ffn
            yield "shared_experts x experts.ffn", "tp", width, tp


def _of_blocks(plan: Plan) -> Iterator[_Division]:
    """Yield the widths that are cut in blocks, each with a scale."""
    precision, tp = plan.mathematics.precision, plan.mesh.tp
    blocks = {
        "fp8_block": precision.is_fp8 * precision.fp8_block,
        "int8_block": precision.int8_block,
    }
    for name, block in blocks.items():
        if not block:
            continue
        yield "hidden", name, plan.model.hidden, block
        model, latent = plan.model, plan.model.latent
        part, width = "head_dim", model.head_dim
        if latent is not None:
            part, width = "value_dim", latent.value_dim
        yield f"heads x {part}", f"tp x {name}", model.heads * width, tp * block
        if name == "fp8_block" and latent is None:
            yield f"kv_heads x {part}", f"tp x {name}", model.kv_heads * width, tp * block
        for inner, cut, width, degree in _inner_widths(plan):
            yield inner, f"{cut} x {name}", width, degree * block


def _of_tokens(plan: Plan) -> Iterator[_Division]:
    mesh, layout, numbers = plan.mesh, plan.layout, plan.mathematics
    length, context = numbers.sequence_length, plan.layout.context
    pieces = lcm(mesh.cp, context.record.chunks(mesh.cp // max(1, context.ulysses_degree)))
    yield "sequence_length", "chunks of context ranks", length, pieces
    if layout.sequence_parallel:
        yield "sequence_length", "cp x tp", length, mesh.cp * mesh.tp
    samples = mesh.dp * layout.microbatch_sequences
    yield "global_sequences", "dp x microbatch_sequences", numbers.global_sequences, samples


def _of_experts(plan: Plan) -> Iterator[_Division]:
    experts, layout, mesh = plan.model.experts, plan.layout, plan.mesh
    if experts is None:
        return
    yield "num_experts", "ep", experts.num_experts, mesh.ep
    yield "num_experts", "groups", experts.num_experts, experts.groups
    tokens = layout.microbatch_sequences * plan.mathematics.sequence_length // mesh.cp
    if not layout.sequence_parallel:
        yield "tokens of a microbatch", "tp", tokens, mesh.tp
    if mesh.ep > 1:
        parts = mesh.tp if layout.experts.expert_tp == 1 else 1
        yield "tokens that travel", "experts.chunks", tokens // parts, layout.experts.chunks


def _orders(plan: Plan) -> Iterator[Relation]:
    model, numbers, pipeline = plan.model, plan.mathematics, plan.layout.pipeline
    length, faults = numbers.sequence_length, coverage_problem(pipeline.stages, model.layers)
    yield Relation(
        name="stages have each block once, in order",
        text="; ".join(faults) or f"{model.layers} blocks",
        holds=not faults,
    )
    if model.positions != "rope":
        yield _at_least("learned positions", model.max_positions, "sequence_length", length)
    if not pipeline.rows and plan.mesh.pp > 1:
        count, builder = plan.num_microbatches, SCHEDULES[pipeline.schedule]
        yield Relation(
            name=f"{pipeline.schedule} takes the number of microbatches",
            text=f"{count} of {plan.mesh.pp} pipeline ranks",
            holds=builder.allows_microbatches(plan.mesh.pp, count),
        )
    if model.positions == "rope" and model.rotary.fraction:
        yield _at_least("dims that turn", model.turned_dims, "a pair", 2)
    experts, factor = model.experts, numbers.balance.capacity_factor
    if experts is None:
        return
    choices = experts.num_experts * experts.top_groups // experts.groups
    yield _at_least("experts that a token may be routed to", choices, "top_k", experts.top_k)
    yield _at_least(
        "layers", model.layers, "dense ones and one more", experts.first_dense_layers + 1
    )
    if factor is not None:
        room = unrounded_capacity(factor, length, experts.num_experts, experts.top_k)
        yield _at_least("the room of an expert", room, "one token", 1)


def _at_least(name: str, number: float, least_name: str, least: float) -> Relation:
    text = f"{number:g} of at least {least:g}"
    return Relation(name=f"{name} hold {least_name}", text=text, holds=number >= least)
