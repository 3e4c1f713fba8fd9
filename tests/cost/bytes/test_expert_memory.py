"""What rows at experts hold: by hand, and seen by the allocator of ranks that send them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.cost.bytes.expert_memory import balanced_memory, worst_memory
from echelon.cost.bytes.transient import transient_terms
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import part_of
from tests.cost.expert_memory_targets import DispatchMemory, rows_allocate
from tests.parallel.layouts import LAPTOP, MIXTRAL, plan_of

WIDE = replace(MIXTRAL, layers=1, hidden=512, max_positions=2**20)
TIGHT = Balance(capacity_factor=1.0)


def wide_plan(nodes: int = 1, **changes: Any) -> Plan:
    """Return a plan whose rows are many and wide, so that little else is to be seen."""
    changes = {"model": WIDE, "microbatches": 1, "dtype": "fp32", "sequence_length": 512} | changes
    plan = plan_of(**changes)
    node = plan.mesh.world_size // nodes
    return replace(plan, cluster=replace(LAPTOP, devices_per_node=node, nodes=nodes))


def test_balanced_rows_by_hand() -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=2, ep=2, microbatches=1)
    memory = balanced_memory(plan)
    # 8 tokens with 2 experts each: 16 rows, of which 8 are from the other rank.
    assert memory.rows_here == 16
    row, gate = 16 * 8, 8
    assert memory.kept.bytes == 16 * (row + gate + 2 * 12 * 8)
    # Back: outputs twice, 8 that return, 16 put together, and 8 tokens.
    assert memory.in_dispatch.bytes == (2 * 16 + 8 + 16) * (row + gate) + 8 * row


def test_all_tokens_to_one_rank_by_hand() -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=4, microbatches=1)
    worst = worst_memory(plan)
    # A rank has two experts, and so it may be with both choices of all 4 x 8 tokens.
    assert worst.rows_here == 4 * 8 * 2
    assert worst.in_dispatch.bytes == (2 * 64 + 0 + 16) * (16 * 8 + 8) + 8 * 16 * 8
    many = replace(MIXTRAL, experts=Experts(num_experts=8, top_k=3, ffn=12))
    plan = plan_of(model=many, dp_shard=8, ep=8, microbatches=1)
    assert worst_memory(plan).rows_here == 8 * 8


def test_a_capacity_bounds_the_worst() -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=4, microbatches=1, balance=TIGHT)
    # Two tokens of each of four sequences for each of two experts.
    assert worst_memory(plan).rows_here == 4 * 2 * 2 == balanced_memory(plan).rows_here


def test_where_nothing_travels() -> None:
    memory = balanced_memory(plan_of(model=MIXTRAL))
    assert memory.in_dispatch.bytes == 0
    assert memory.rows_here == worst_memory(plan_of(model=MIXTRAL)).rows_here == 16
    assert transient_terms(plan_of(model=MIXTRAL), 0) == ()


def test_a_plan_says_what_an_uneven_load_would_hold() -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=4, microbatches=1)
    (term,) = (t for t in transient_terms(plan, 0) if t.name == "rows in dispatch")
    assert term.bytes == balanced_memory(plan).in_dispatch.bytes
    assert f"{worst_memory(plan).in_dispatch.bytes:,} if all go to one rank" in term.formula


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_rank_holds_its_share_of_the_experts(ep: int) -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=ep, bucket_bytes=2**30)
    for rank in range(4):
        buckets = plan_buckets(plan, part_of(plan, rank))
        held = sum(bucket.num_elements for bucket in buckets if bucket.expert)
        assert held == 2 * (8 // ep) * 3 * 12 * 16


LAYOUTS = {
    "flat": (wide_plan(dp_shard=4, ep=4), False),
    "flat, all to one": (wide_plan(dp_shard=4, ep=4), True),
    "padded": (
        wide_plan(dp_shard=4, ep=4, balance=TIGHT, experts=ExpertLayout(padded=True)),
        False,
    ),
    "two hops": (wide_plan(2, dp_shard=4, ep=4, experts=ExpertLayout(dispatch="two-hop")), False),
    "two hops, all to one": (
        wide_plan(2, dp_shard=4, ep=4, experts=ExpertLayout(dispatch="two-hop")),
        True,
    ),
}


@pytest.mark.parametrize(("plan", "to_one"), list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_ranks_allocate_what_is_stated(rank_pool: RankPool, plan: Plan, to_one: bool) -> None:
    ranks: list[DispatchMemory] = rank_pool.run(rows_allocate, (plan, to_one), world_size=4)
    memory = (worst_memory if to_one else balanced_memory)(plan)
    most = max(ranks, key=lambda rank: max(rank.there, rank.back))
    assert most.rows == memory.rows_here
    found, stated = max(most.there, most.back), memory.in_dispatch.bytes
    if plan.layout.experts.dispatch == "two-hop" and not to_one:
        # In turn, both experts of a token are on one node: fewer pairs than are likely.
        assert 0.8 * stated < found < stated
    else:
        assert found == pytest.approx(stated, rel=0.02)
