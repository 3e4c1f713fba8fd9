"""Which ranks sum with a rank: data ranks, those of slices, both ends, and mirrors."""

from __future__ import annotations

from echelon.core.experts import ExpertLayout
from echelon.layout.sum_groups import end_ranks, gradient_ranks, mirror_ranks, shard_ranks
from tests.parallel.layouts import MIXTRAL, plan_of


def test_slices_are_shared_in_a_replica_and_gradients_over_all() -> None:
    plan = plan_of(dp=2, dp_shard=2, tp=2)
    assert gradient_ranks(plan, 3, expert=False) == (1, 3, 5, 7)
    assert shard_ranks(plan, 3, expert=False) == (1, 3)


def test_experts_have_groups_of_their_own() -> None:
    plan = plan_of(model=MIXTRAL, dp=2, dp_shard=4, ep=2, experts=ExpertLayout(zero_stage=3))
    assert gradient_ranks(plan, 1, expert=True) == (1, 3, 5, 7)
    assert shard_ranks(plan, 5, expert=True) == (5, 7)


def test_ends_of_a_pipeline_and_mirrors() -> None:
    plan = plan_of(pp=4, tp=2)
    assert end_ranks(plan, 3) == (1, 7)
    assert mirror_ranks(plan, 3) == mirror_ranks(plan, 5) == (3, 5)
    bent = plan_of(pp=2, virtual_stages=2, schedule="zb-v")
    assert end_ranks(bent, 1) == (0, 0)
