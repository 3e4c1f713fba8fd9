"""Which ranks of a node share out the same parameters, and what each of them keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan, Zero
from echelon.layout.buckets import plan_buckets
from echelon.layout.data_groups import (
    across_groups,
    end_ranks,
    gradient_ranks,
    hop_degrees,
    mirror_ranks,
    node_groups,
    ranks_per_node,
    secondary_degree,
    secondary_elements,
    shard_ranks,
)
from echelon.layout.stage import rank_part
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.parallel.secondary.nodes import on_nodes


@pytest.mark.parametrize(
    ("ranks", "node", "each"),
    [
        ((0, 1, 2, 3), 2, 2),
        ((0, 2, 4, 6), 4, 2),
        ((0, 1, 2, 3), 4, 1),
        ((0, 1, 2, 3), 1, 1),
        ((0, 1, 2, 3, 4, 5), 4, 1),
        ((0, 1, 2, 3, 4, 5), 3, 3),
    ],
)
def test_a_group_has_both_tiers_or_is_left_alone(
    ranks: tuple[int, ...], node: int, each: int
) -> None:
    assert ranks_per_node([ranks], node) == each


def test_groups_that_lie_otherwise_are_left_alone() -> None:
    assert ranks_per_node([(0, 1, 2, 3), (4, 5, 6, 7)], 3) == 1


def plan(**zero: object) -> Plan:
    return on_nodes(plan_of(dp_shard=4, tp=2, zero=replace(Zero(stage=3), **zero)), 4)


def test_each_rank_keeps_its_share_of_a_node() -> None:
    kept = plan(secondary=True, keep_whole_below=20)
    assert secondary_degree(kept) == 2
    for bucket in plan_buckets(kept, rank_part(kept, 0)):
        wanted = bucket.num_elements // 2 if bucket.sliced else 0
        assert secondary_elements(kept, bucket) == wanted
    for other in (plan(), plan(secondary=True, reshard_after_forward=False), plan(stage=2)):
        assert secondary_degree(other) == 1
        assert node_groups(other) == ()


def test_hops_pair_the_same_places_of_nodes() -> None:
    rounded = plan(reduce="int4", stage=1)
    assert hop_degrees(rounded) == (2, 2)
    assert node_groups(rounded) == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert across_groups(rounded) == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert hop_degrees(plan(reduce="int4", stage=0)) == (1, 1)


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
