"""Plans of one block over context ranks, what they attend to, and the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from echelon.core.event import Event
from echelon.core.plan import Context, ContextKind, Plan
from echelon.launch.local.supervisor import RankPool
from echelon.models.attention.reference import ScoreForm, attention_reference, visible
from tests.parallel.context import targets as context_targets
from tests.parallel.context.targets import Attention, Inputs
from tests.parallel.layouts import NANO, plan_of

T, B, HD = 48, 2, 4


DOCUMENTS = ((0, 3, 4, 29), (0, 40))


HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "odd": (12, 6)}


def context_plan(
    kind: ContextKind, cp: int, ulysses: int, *, heads: str = "gqa", **mask: Any
) -> Plan:
    """Return a plan of one block over context ranks."""
    h, k = HEADS[heads]
    model = replace(NANO, layers=1, heads=h, kv_heads=k, max_positions=T)
    plan = plan_of(model=replace(model, **mask), sequence_length=T, microbatch_sequences=B)
    layout = replace(
        plan.layout,
        mesh=replace(plan.mesh, cp=cp),
        context=Context(kind=kind, ulysses_degree=ulysses),
    )
    mathematics = replace(plan.mathematics, global_sequences=B)
    return replace(plan, layout=layout, mathematics=mathematics)


def inputs_of(plan: Plan, *, documents: bool, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    h, k = plan.model.heads, plan.model.kv_heads

    def values(heads: int) -> torch.Tensor:
        return torch.randn(T, B, heads, HD, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(
        q=values(h),
        k=values(k),
        v=values(k),
        dout=values(h),
        documents=DOCUMENTS if documents else None,
    )


def run(plan: Plan, inputs: Inputs, pool: RankPool) -> list[Attention]:
    ranks = pool.run(context_targets.attend, (plan, inputs), world_size=plan.mesh.world_size)
    assert all(isinstance(rank, Attention) for rank in ranks)
    return ranks


def reference(plan: Plan, inputs: Inputs) -> dict[str, torch.Tensor]:
    q, k, v = (x.double().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    positions = torch.arange(T)
    seen = visible(positions, positions, plan.model.mask, inputs.documents)
    form = ScoreForm(scale=plan.model.attention_scale, soft_cap=plan.model.soft_cap)
    sinks = context_targets.sinks_of(plan) if plan.model.sinks else None
    out, _ = attention_reference(q, k, v, seen, form, sinks)
    out.backward(inputs.dout.double())
    values = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if sinks is not None:
        values["dsinks"] = sinks.grad
    return {name: context_targets.given(value) for name, value in values.items()}


def sent(rank: Attention) -> tuple[int, int]:
    """Return the bytes that a rank sent, forward and backward."""
    return total(rank.forward), total(rank.backward)


def total(events: list[Event]) -> int:
    return sum(event.bytes for event in events)
