"""A sample of the plan matrix in which every choice of a layout occurs, in every precision.

The plans are those of `prove/matrix.py`, and turn with their place: the precision, and whether the
inputs of recomputed blocks wait on the host.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from echelon.core.plan import Plan, Precision, Recompute
from echelon.prove.cases import MAX_WORLD
from echelon.prove.matrix import AnyCase, every_case

PRECISIONS: tuple[Precision, ...] = (
    Precision(),
    Precision(parameters="bf16"),
    Precision(parameters="fp64", gradients="fp64", reduction="fp64", master="fp64"),
    Precision(parameters="bf16", gradients="bf16", reduction="bf16"),
    Precision(parameters="fp16", gradients="fp32", reduction="fp16"),
)
"""What the plans of a sample compute in, in turn."""

_LOOKS = 4
"""For each plan of a sample so many cases are looked at for choices that have not been met."""


def sample(count: int, seed: int, max_world: int = MAX_WORLD) -> list[Plan]:
    """Return `count` distinct plans: those that bring in a new choice first, then any."""
    generator = random.Random(seed)
    cases = [case for case in every_case() if case.world_size <= max_world]
    generator.shuffle(cases)
    plans: list[Plan] = []
    rest: list[AnyCase] = []
    met: set[str] = set()
    for place, case in enumerate(cases):
        # To build a plan may be to search its schedule: not all of them are looked at.
        if len(plans) == count or place >= _LOOKS * count:
            rest += cases[place:]
            break
        plan = case.plan()
        found = set(choices(plan))
        if found <= met:
            rest.append(case)
            continue
        met |= found
        plans.append(turned(plan, len(plans)))
    by_kind: dict[type, list[AnyCase]] = {}
    for case in rest:
        by_kind.setdefault(type(case), []).append(case)
    while len(plans) < count and any(by_kind.values()):
        for kind in by_kind.values():
            if kind and len(plans) < count:
                plans.append(turned(kind.pop().plan(), len(plans)))
    generator.shuffle(plans)
    return plans


def turned(plan: Plan, turn: int) -> Plan:
    """Return the plan in the precision of its turn, stored inputs on the host in every other."""
    recompute = plan.layout.recompute
    if recompute.policy == "full" and turn % 2:
        recompute = Recompute(policy="full", every=recompute.every, offload="host")
    mathematics = replace(plan.mathematics, precision=PRECISIONS[turn % len(PRECISIONS)])
    layout = replace(plan.layout, recompute=recompute)
    return replace(plan, mathematics=mathematics, layout=layout)


def choices(plan: Plan) -> Iterator[str]:
    """Yield, in words, what a plan chooses of all that there is to choose."""
    layout, mesh, model = plan.layout, plan.mesh, plan.model
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        if getattr(mesh, axis) > 1:
            yield f"{axis} > 1"
    zero, experts, balance = layout.zero, layout.experts, plan.mathematics.balance
    yield f"ZeRO {zero.stage}, {zero.accumulate}"
    yield f"optimizer {plan.mathematics.optimizer.kind} on {zero.optimizer_offload}"
    yield f"parameters on {zero.parameter_offload}"
    yield f"schedule {layout.pipeline.schedule if mesh.pp > 1 else 'none'}"
    yield f"recompute {layout.recompute.policy}, every {layout.recompute.every}"
    yield f"sequence parallel {layout.sequence_parallel}, tied {model.tied}"
    yield f"documents {plan.mathematics.documents}"
    yield f"norm {model.norm}, positions {model.positions}, heads normed {model.qk_norm}"
    yield f"dropout {model.dropout}, soft cap {model.soft_cap}, window {model.window is not None}"
    if mesh.cp > 1:
        yield f"context {layout.context.kind} {layout.context.ulysses_degree}"
    if model.latent is not None:
        yield "latent attention"
    if model.experts is not None:
        yield f"experts {experts.dispatch}, padded {experts.padded}, chunks {experts.chunks}"
        yield f"pieces {experts.expert_tp}, ZeRO of experts {experts.zero_stage}"
        yield f"router {model.experts.router}, drop {balance.capacity_factor and balance.drop}"
        yield f"balance {balance.kind} over {balance.aux_over}, route {balance.route}"
