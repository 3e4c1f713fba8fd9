"""Plans whose experts are not counted by the host are proven, and a wrong end of rows is named."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.plan import Recompute, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.proof.device_calls import grouped_calls
from tests.proof.mutants.expert_layouts import AUX, BIAS
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught

DROPS = Balance(capacity_factor=0.75)
PLANS: dict[str, dict[str, Any]] = {
    "one rank, drops": {"balance": DROPS},
    "ZeRO-3, a bias": {"model": DEEPSEEK, "dp_shard": 2, "zero": Zero(stage=3), "balance": BIAS},
    "ZeRO-2, drops": {"dp_shard": 2, "zero": Zero(stage=2), "balance": DROPS},
    "recompute": {"recompute": Recompute(policy="full"), "balance": AUX, "dp": 2},
    "B and W apart": {"pp": 2, "schedule": "zb-h1", "microbatches": 4, "balance": DROPS},
    "pieces": {"tp": 2, "experts": ExpertLayout(expert_tp=2)},
    "pieces of scattered rows": {
        **{"tp": 2, "sequence_parallel": True},
        **{"experts": ExpertLayout(expert_tp=2), "balance": DROPS},
    },
    "context ranks": {"cp": 2, "balance": DROPS},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", PLANS)
def test_plans_are_proven_without_counts(case: str, rank_pool: RankPool) -> None:
    plan = plan_of(**{"model": MIXTRAL, "bucket_bytes": 1 << 20, **PLANS[case]})
    subject = f"{grouped_calls.__name__}:nothing_wrong"
    prove(plan, run_ranks=rank_pool.run, subject=subject).require()


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "told"), mutants_of(grouped_calls))
def test_a_wrong_end_is_caught_and_named(mutant: str, told: Told, rank_pool: RankPool) -> None:
    assert_caught(mutant, told, rank_pool)
