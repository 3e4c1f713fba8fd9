"""Latent attention is proven under every parallelism: values, gradients, norms, updates, bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.model_shape import LatentAttention
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.proof.layouts import BF16, Changes, layout

SHAPE = LatentAttention(query_rank=6, kv_rank=5, nope_dim=2, rope_dim=2, value_dim=3)
RING: Changes = {"mesh": {"cp": 2}, "context": {"kind": "ring"}}
ULYSSES: Changes = {"mesh": {"cp": 2}, "context": {"kind": "ulysses", "ulysses_degree": 2}}

CASES: dict[str, Changes] = {
    "one": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2 scattered": {"tp": 2, "sequence_parallel": True},
    "tp2, muon": {"tp": 2, "optimizer": {"kind": "muon"}},
    "pp2": {"pp": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zb-h1, tp2 scattered": {
        "pp": 2,
        "schedule": "zb-h1",
        "tp": 2,
        "sequence_parallel": True,
        "recompute": "full",
    },
    "zero 2": {"dp": 2, "zero": {"stage": 2}},
    "zero 3": {"dp": 2, "zero": {"stage": 3}},
    "zero 3, tp2": {"dp": 2, "zero": {"stage": 3}, "tp": 2, "recompute": "full"},
    "recompute, tp2": {"tp": 2, "recompute": "full"},
    "recompute, tp2 scattered": {"tp": 2, "recompute": "full", "sequence_parallel": True},
    "ring": RING,
    "striped": {"mesh": {"cp": 2}, "context": {"kind": "striped"}},
    "gathered": {"mesh": {"cp": 2}, "context": {"kind": "gathered"}},
    "ulysses": ULYSSES,
    "ulysses in a ring": {
        "mesh": {"cp": 4},
        "context": {"kind": "ulysses-ring", "ulysses_degree": 2},
    },
    "ring, documents": {**RING, "documents": "separate"},
    "ring, tp2": {**RING, "tp": 2},
    "ring, tp2 scattered, zb-h1": {
        **RING,
        "tp": 2,
        "sequence_parallel": True,
        "pp": 2,
        "schedule": "zb-h1",
    },
    "ulysses, tp2 scattered": {**ULYSSES, "tp": 2, "sequence_parallel": True},
}


def latent_layout(changes: Changes) -> Plan:
    """Return a plan whose heads come out of narrow vectors."""
    plan = layout(**changes)
    model = replace(plan.model, latent=SHAPE, head_dim=4, kv_heads=plan.model.heads)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    proof = prove(latent_layout(CASES[name]), run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert proof.shrunk_plan.model.latent is not None
    claims = proof.passes[0].claims
    assert all(claim.compared > 0 for claim in claims)
    assert max(claim.max_error for claim in claims) <= 1e-10
    sent = [claim.max_error for claim in claims if claim.rule.id == "prove-bytes-sent"]
    assert sent == ([0.0] if proof.mesh != "1" else [])


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", ["tp2 scattered", "ring, tp2"])
def test_bfloat16_is_proven(name: str, rank_pool: RankPool) -> None:
    plan = latent_layout({**CASES[name], "precision": BF16})
    proof = prove(plan, run_ranks=rank_pool.run)
    proof.require()
    assert [one.precision for one in proof.passes] == ["fp64", "bf16"]
