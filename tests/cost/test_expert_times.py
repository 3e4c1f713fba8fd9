"""Seconds of rows on their way to experts: alpha + n / beta on each tier, less what hides them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.cluster import Link
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.cost.expert_load import balanced_pairs, rows_per_expert
from echelon.cost.expert_times import TravelSeconds, dispatch_seconds, waited_s
from echelon.cost.flops import model_flops_per_token
from echelon.cost.unit_times import expert_waits_s, flops_rate, modelled_times
from tests.parallel.layouts import LAPTOP, MIXTRAL, plan_of

FAST = Link(name="fast", degree=2, bandwidth=1e9, latency_s=1e-6)
SLOW = Link(name="slow", degree=4, bandwidth=1e8, latency_s=1e-5)
SHARED = replace(MIXTRAL, experts=Experts(num_experts=8, top_k=2, ffn=12, shared_experts=1))


def linked(*links: Link, **changes: Any) -> Plan:
    """Return a plan on two nodes of two devices."""
    plan = plan_of(**({"model": MIXTRAL, "dp_shard": 4, "ep": 4, "microbatches": 1} | changes))
    cluster = replace(LAPTOP, devices_per_node=2, nodes=2, links=links or (FAST, SLOW))
    return replace(plan, cluster=cluster)


def test_tiers_run_side_by_side() -> None:
    seconds = dispatch_seconds(linked())
    assert seconds is not None
    # 12 of 16 rows leave, 4 to each rank: 8 of them over the slow link, and their counts before.
    there, back = 8 * (16 * 8 + 8), 8 * 16 * 8
    told = 2 * 2 * 8
    assert seconds.forward.there_s == pytest.approx(2 * 1e-5 + (there + told) / 1e8)
    assert seconds.forward.back_s == pytest.approx(1e-5 + back / 1e8)
    assert seconds.backward.there_s == pytest.approx(1e-5 + back / 1e8)
    assert seconds.backward.back_s == pytest.approx(1e-5 + there / 1e8)


def test_two_hops_follow_one_another() -> None:
    plan = linked(experts=ExpertLayout(dispatch="two-hop"))
    seconds, pairs = dispatch_seconds(plan), balanced_pairs(plan, 2).leaving
    assert seconds is not None
    across = 1e-5 + pairs * 16 * 8 / 1e8
    assert seconds.forward.back_s == pytest.approx(across + 1e-6 + 8 * 16 * 8 / 1e9)


def test_chunks_start_again_and_padding_tells_nothing() -> None:
    whole, parts = (
        dispatch_seconds(linked()),
        dispatch_seconds(linked(experts=ExpertLayout(chunks=4))),
    )
    assert whole is not None
    assert parts is not None
    assert parts.forward.back_s - whole.forward.back_s == pytest.approx(3e-5)
    tight = Balance(capacity_factor=1.0)
    padded = dispatch_seconds(linked(balance=tight, experts=ExpertLayout(padded=True)))
    assert padded is not None
    assert padded.forward.there_s == pytest.approx(1e-5 + 8 * (16 * 8 + 8) / 1e8)


def test_without_links_or_travel_there_are_no_seconds() -> None:
    assert dispatch_seconds(plan_of(model=MIXTRAL, dp_shard=2, ep=2)) is None
    assert dispatch_seconds(linked(FAST)) is None
    assert dispatch_seconds(linked(ep=1)) is None
    assert expert_waits_s(linked(FAST)) == (0.0, 0.0)


def test_all_of_one_chunk_is_waited_for() -> None:
    travel = TravelSeconds(there_s=3.0, back_s=2.0)
    assert waited_s(travel, work_s=7.0, beside_s=0.0, chunks=1) == 5.0


def test_shared_experts_hide_the_way_there() -> None:
    travel = TravelSeconds(there_s=3.0, back_s=2.0)
    assert waited_s(travel, work_s=7.0, beside_s=2.0, chunks=1) == 3.0
    assert waited_s(travel, work_s=7.0, beside_s=9.0, chunks=1) == 2.0


def test_chunks_hide_each_other() -> None:
    travel = TravelSeconds(there_s=4.0, back_s=4.0)
    # There 1, work 1, there 2 meanwhile; back 1 while 2 is at work; back 2: first and last show.
    assert waited_s(travel, work_s=40.0, beside_s=0.0, chunks=2) == 4.0
    assert waited_s(travel, work_s=40.0, beside_s=0.0, chunks=4) == 2.0
    # Where the link is slower, all work but one chunk is hidden instead.
    assert waited_s(travel, work_s=2.0, beside_s=0.0, chunks=2) == 8.0 - 2.0


def test_a_block_with_experts_waits_for_its_rows() -> None:
    near, far = linked(FAST), linked()
    waits = expert_waits_s(far)
    seconds = dispatch_seconds(far)
    assert seconds is not None
    assert waits[0] == pytest.approx(seconds.forward.there_s + seconds.forward.back_s)
    more = modelled_times(far), modelled_times(near)
    assert more[0].forward_s["layers.0"] - more[1].forward_s["layers.0"] == pytest.approx(waits[0])
    assert more[0].input_gradient_s["layers.0"] - more[1].input_gradient_s["layers.0"] == (
        pytest.approx(waits[1])
    )
    assert more[0].weight_gradient_s == more[1].weight_gradient_s
    assert expert_waits_s(linked(model=SHARED))[0] < waits[0]


@pytest.mark.parametrize("expert_tp", [1, 2])
def test_tensor_ranks_share_out_experts_whole_or_in_pieces(expert_tp: int) -> None:
    experts = ExpertLayout(expert_tp=expert_tp)
    one = modelled_times(plan_of(model=MIXTRAL))
    two = modelled_times(plan_of(model=MIXTRAL, tp=2, experts=experts))
    assert two.weight_gradient_s["layers.0"] == pytest.approx(one.weight_gradient_s["layers.0"] / 2)


def test_padded_rows_are_multiplied_too() -> None:
    room = Balance(capacity_factor=2.0)
    plain = plan_of(model=MIXTRAL, dp_shard=2, ep=2, balance=room)
    padded = plan_of(
        model=MIXTRAL, dp_shard=2, ep=2, balance=room, experts=ExpertLayout(padded=True)
    )
    more = modelled_times(padded).weight_gradient_s["layers.0"]
    more -= modelled_times(plain).weight_gradient_s["layers.0"]
    # Twice the room, so once more the products of 8 tokens with 2 experts each.
    assert more == pytest.approx(2 * 16 * 3 * 16 * 12 / flops_rate(plain))


def test_rows_of_an_expert() -> None:
    assert rows_per_expert(plan_of(model=MIXTRAL, dp_shard=4, ep=4)) == 4 * 8 * 2 / 8
    assert rows_per_expert(plan_of(model=MIXTRAL)) == 8 * 2 / 8


def test_active_and_all_flops() -> None:
    active, every = (model_flops_per_token(MIXTRAL, 8, all_experts=a) for a in (False, True))
    assert every - active == 6 * 2 * (8 - 2) * 3 * 12 * 16
