"""Bytes of parameter gathers by tier: what secondary slices move inside of nodes, by hand."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.plan import Zero
from echelon.cost.bytes.gather_tiers import parameter_gather_tiers
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from tests.parallel.layouts import plan_of
from tests.parallel.secondary.nodes import on_nodes, without_secondary


def test_one_gather_of_a_step_crosses_nodes_and_all_others_stay() -> None:
    zero = Zero(stage=3, accumulate="slices", secondary=True)
    plan = on_nodes(plan_of(dp_shard=8, microbatches=3, zero=zero), 4)
    buckets = plan_buckets(plan, rank_part(plan, 0))
    elements = {bool(b.backward_units): 0 for b in buckets}
    for bucket in buckets:
        elements[bool(bucket.backward_units)] += bucket.num_elements
    both, looked_up = elements[True] * 8, elements[False] * 8  # bytes
    near, far = parameter_gather_tiers(plan, 5)
    assert far == (both + looked_up) * 4 // 8
    later = 5 * both + 2 * looked_up
    assert near == (both + looked_up) * 3 // 8 + later * 3 // 4
    plain = parameter_gather_tiers(without_secondary(plan), 5)
    assert plain == ((6 * both + 3 * looked_up) * 3 // 8, (6 * both + 3 * looked_up) * 4 // 8)


def test_inside_of_one_node_nothing_crosses() -> None:
    plan = plan_of(dp_shard=4, zero=Zero(stage=3))
    near, far = parameter_gather_tiers(plan, 0)
    assert near > 0
    assert far == 0
    alone = on_nodes(replace(plan), 1)
    assert parameter_gather_tiers(alone, 0) == (0, near)
