"""Ways of tokens to experts are proven: values, gradients, norms, updates, routes and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.plan import DType, Plan, Recompute, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.proof import run
from echelon.proof.shrink import shrink
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of

AUX = Balance(kind="aux", aux_coefficient=0.1)
BIAS = Balance(kind="bias", bias_rate=0.05, z_coefficient=0.01)
FULL = Recompute(policy="full")
TIGHT = replace(AUX, capacity_factor=1.0)
BY_SCORE = replace(TIGHT, drop="score")
HOPS = ExpertLayout(dispatch="two-hop")
PADDED = ExpertLayout(padded=True)
FOUR: dict[str, Any] = {"dp_shard": 4, "ep": 4}
TP: dict[str, Any] = {"dp_shard": 2, "tp": 2, "ep": 4}
CP: dict[str, Any] = {"dp_shard": 2, "cp": 2, "ep": 4}
PIECES: dict[str, Any] = {"dp_shard": 4, "tp": 2, "ep": 4}
ZERO_3 = Zero(stage=3)

CASES: dict[str, dict[str, Any]] = {
    "one hop, experts and replicas": {
        "model": MIXTRAL,
        "dp": 2,
        "dp_shard": 2,
        "ep": 2,
        "balance": AUX,
        "zero": Zero(stage=1),
    },
    "two hops, auxiliary loss": {**FOUR, "balance": AUX, "experts": HOPS},
    "two hops, bias": {**FOUR, "model": DEEPSEEK, "balance": BIAS, "experts": HOPS},
    "two hops, capacity, zero 3": {
        **FOUR,
        "model": DEEPSEEK,
        "balance": TIGHT,
        "experts": replace(HOPS, zero_stage=3),
        "zero": ZERO_3,
    },
    "two hops, all to one": {**FOUR, "balance": replace(AUX, route="one"), "experts": HOPS},
    "two hops, an empty expert": {
        **FOUR,
        "balance": replace(AUX, route="not-last"),
        "experts": HOPS,
    },
    "two hops over tp, scattered": {
        **TP,
        "model": DEEPSEEK,
        "balance": AUX,
        "sequence_parallel": True,
        "experts": HOPS,
    },
    "two hops over cp, recompute": {
        **CP,
        "model": DEEPSEEK,
        "balance": BY_SCORE,
        "experts": replace(HOPS, chunks=2),
        "recompute": FULL,
    },
    "two hops, pieces": {
        **PIECES,
        "model": DEEPSEEK,
        "balance": TIGHT,
        "experts": replace(HOPS, expert_tp=2),
    },
    "two hops, zero bubble": {
        **FOUR,
        "pp": 2,
        "schedule": "zb-h1",
        "model": DEEPSEEK,
        "balance": AUX,
        "experts": replace(HOPS, chunks=4),
        "microbatch_sequences": 2,
    },
    "padded": {"dp_shard": 2, "ep": 2, "balance": TIGHT, "experts": PADDED},
    "padded, by score, zero 3": {
        **FOUR,
        "model": DEEPSEEK,
        "balance": BY_SCORE,
        "experts": replace(PADDED, zero_stage=3),
        "zero": ZERO_3,
    },
    "padded over cp, chunks": {
        **CP,
        "model": DEEPSEEK,
        "balance": TIGHT,
        "experts": replace(PADDED, chunks=2),
        "microbatch_sequences": 2,
    },
    "padded over tp, scattered, recompute": {
        **TP,
        "balance": TIGHT,
        "experts": PADDED,
        "sequence_parallel": True,
        "recompute": FULL,
    },
    "padded, pieces": {
        "dp_shard": 2,
        "tp": 2,
        "ep": 2,
        "balance": TIGHT,
        "experts": replace(PADDED, expert_tp=2),
    },
    "padded, all to one": {
        "dp_shard": 2,
        "ep": 2,
        "balance": replace(TIGHT, route="one"),
        "experts": PADDED,
    },
    "two chunks": {"dp_shard": 2, "ep": 2, "balance": AUX, "experts": ExpertLayout(chunks=2)},
    "four chunks": {
        **FOUR,
        "model": DEEPSEEK,
        "balance": BIAS,
        "experts": ExpertLayout(chunks=4),
        "microbatch_sequences": 2,
    },
    "four chunks over tp, recompute": {
        "tp": 2,
        "ep": 2,
        "model": DEEPSEEK,
        "balance": TIGHT,
        "experts": ExpertLayout(chunks=4),
        "recompute": FULL,
        "microbatch_sequences": 2,
    },
}


def case_plan(name: str) -> Plan:
    """Return the plan of a case; with two hops each pipeline rank has two nodes."""
    plan = plan_of(**{"model": MIXTRAL, **CASES[name]})
    if plan.layout.experts.dispatch != "two-hop":
        return plan
    mesh = plan.mesh
    devices = mesh.world_size // mesh.pp // 2
    cluster = replace(plan.cluster, nodes=2 * mesh.pp, devices_per_node=devices)
    return replace(plan, cluster=cluster)


def with_all_chunks(
    plan: Plan, *, precision: DType | None = None, names_apart: bool = False
) -> Plan:
    """Return what is proven of a plan, in as many chunks as the plan has."""
    small = shrink(plan, precision=precision, names_apart=names_apart)
    return replace(small, layout=replace(small.layout, experts=plan.layout.experts))


@pytest.mark.system("S37", "S39")
@pytest.mark.quick("padded")
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "shrink", with_all_chunks)
    plan = case_plan(name)
    proof = run.prove(plan, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert proof.shrunk_plan.layout.experts == plan.layout.experts
    assert max(claim.max_error for claim in proof.passes[0].claims) <= 1e-10
