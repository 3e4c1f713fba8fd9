"""Parameters gathered in 8 bits: the same step bit for bit, bytes, and slices cut anywhere."""

from __future__ import annotations

import pytest

from echelon.core.plan import Plan
from echelon.launch.local.pool import RankPool
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from echelon.proof.run import prove
from tests.proof.layouts import Changes, layout

FP8: Changes = {"matmul": "fp8", "fp8_block": 8}
GATHER: Changes = {"stage": 3, "gather": "fp8"}

CASES: dict[str, Changes] = {
    "dp3": {"dp": 3},
    "tp2": {"dp": 2, "tp": 2},
    "tp2 scattered": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "ring": {"mesh": {"cp": 2}, "dp": 2, "context": {"kind": "ring"}},
    "1f1b": {"dp": 2, "pp": 2},
    "zb-h1": {"dp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "replicas": {"mesh": {"dp_replicate": 2}, "dp": 2},
    "kept whole until the end of the step": {
        "dp": 2,
        "zero": {**GATHER, "reshard_after_forward": False},
    },
    "slices add up": {"dp": 2, "zero": {**GATHER, "accumulate": "slices", "unit_blocks": 2}},
}


def require_proven(plan: Plan, rank_pool: RankPool) -> None:
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    shrunk = proof.shrunk_plan
    assert any(one.fp8_squares for one in plan_buckets(shrunk, rank_part(shrunk, 0)))
    claims = proof.passes[0].claims
    assert max(claim.max_error for claim in claims) <= 1e-10
    assert [c.max_error for c in claims if c.rule.id == "prove-bytes-sent"] == [0.0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    require_proven(layout(**{"zero": GATHER, **CASES[name]}, precision=FP8), rank_pool)
