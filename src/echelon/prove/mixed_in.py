"""Experts in a part of the cases that are about something else, so that each meets each."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.experts import AuxiliaryScope, Balance, BalanceKind, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan

EVERY = 5
"""One case of so many has experts, where its MLPs have a gate and no bias."""

_SCOPES: tuple[AuxiliaryScope, ...] = ("global", "sequence", "microbatch")
_KINDS: tuple[BalanceKind, ...] = ("aux", "bias", "both")


def with_experts(plan: Plan, turn: int) -> Plan:
    """Return a plan whose blocks are mixtures of experts, where `turn` says so."""
    model, mesh = plan.model, plan.mesh
    if turn % EVERY or not model.gated or model.mlp_bias:
        return plan
    turn //= EVERY
    grouped = turn % 2 == 0
    experts = Experts(
        num_experts=8,
        top_k=2,
        ffn=8 * mesh.tp,
        shared_experts=turn // 2 % 2,
        first_dense_layers=turn // 4 % 2 if model.layers > 1 else 0,
        router="sigmoid" if grouped else "softmax",
        router_bias=True,
        groups=4 if grouped else 1,
        top_groups=2 if grouped else 1,
    )
    cut = mesh.tp > 1 and turn // 8 % 2 == 1
    inner = mesh.dp_shard * mesh.cp * (1 if cut else mesh.tp)
    mesh = replace(mesh, ep=2 if inner % 2 == 0 and turn // 16 % 4 else 1)
    pieces = mesh.tp if cut else 1
    shared_out = mesh.expert_shard_degree(expert_tp=pieces) > 1
    layout = replace(
        plan.layout,
        mesh=mesh,
        experts=ExpertLayout(
            expert_tp=pieces, zero_stage=plan.layout.zero.stage if shared_out else 0
        ),
    )
    balance = Balance(
        kind=_KINDS[turn // 64 % 3],
        aux_coefficient=0.1,
        aux_over=_SCOPES[turn // 192 % 3],
        z_coefficient=0.01,
        bias_rate=0.05,
        capacity_factor=1.0 if turn // 576 % 2 else None,
    )
    mathematics = replace(plan.mathematics, model=replace(model, experts=experts), balance=balance)
    return replace(plan, mathematics=mathematics, layout=layout)
