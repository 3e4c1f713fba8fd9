"""Two hops: which ranks they join, and that a token crosses to a node at most once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from tests.parallel.expert import targets as expert_targets
from tests.parallel.expert.targets import Mixed, mixture_plan, stream_of

ELEMENT = 8
"""Bytes of a float64."""
CHOICE = 4
"""Bytes of the number of an expert on its way."""
COUNT = 8
"""Bytes of a count of rows."""
MANY = Experts(num_experts=8, top_k=4, ffn=12)
NODES = 2
TWO_HOP = ExpertLayout(dispatch="two-hop")


def run(plan: Plan, pool: RankPool) -> list[Mixed]:
    return pool.run(expert_targets.mix, (plan, stream_of(plan)), world_size=plan.mesh.world_size)


def hop_plan(experts: Experts = MANY, layout: ExpertLayout = TWO_HOP, **chosen: Any) -> Plan:
    return mixture_plan(nodes=NODES, dp_shard=4, ep=4, experts=experts, layout=layout, **chosen)


def nodes_reached(rank: Mixed) -> torch.Tensor:
    """Return which nodes have an expert with room for each token of a rank, [n, nodes]."""
    nodes_nK = rank.chosen // (MANY.num_experts // NODES)
    return torch.stack([((nodes_nK == node) & rank.kept).any(1) for node in range(NODES)], dim=1)


def crossing(place: int, ranks: list[Mixed]) -> int:
    """Return how many tokens of a rank have an expert on the other node."""
    return int(nodes_reached(ranks[place])[:, 1 - place // 2].sum())


def to_others_on_the_node(place: int, ranks: list[Mixed]) -> int:
    """Return the assignments that a rank hands on to its neighbour, of tokens that are there."""
    neighbour = place ^ 1
    per_rank = MANY.num_experts // len(ranks)
    here = [ranks[place], ranks[(place + 2) % 4]]
    return sum(int(((r.chosen // per_rank == neighbour) & r.kept).sum()) for r in here)


@pytest.mark.system("B10")
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_token_crosses_once_to_each_node_that_it_reaches(
    factor: float | None, chunks: int, rank_pool: RankPool
) -> None:
    """Every byte over both axes, from how the tokens were routed."""
    layout = replace(TWO_HOP, chunks=chunks)
    plan = hop_plan(layout=layout, balance=Balance(capacity_factor=factor))
    ranks = run(plan, rank_pool)
    row, gates = plan.model.hidden * ELEMENT, MANY.top_k * ELEMENT
    for place, rank in enumerate(ranks):
        away, back = crossing(place, ranks), crossing((place + 2) % 4, ranks)
        assert away > 0
        across = {
            "experts.counts": chunks * (NODES - 1) * COUNT,
            "experts.choices": away * MANY.top_k * CHOICE,
            "experts.dispatch": away * row,
            "experts.dispatch.gates": away * gates,
            "experts.combine": back * row,
            "experts.combine.backward": away * row,
            "experts.dispatch.backward": back * row,
            "experts.dispatch.backward.gates": back * gates,
        }
        assert rank.sent("ep_across") == across
        handed, taken = (to_others_on_the_node(one, ranks) for one in (place, place ^ 1))
        # What its neighbour hands on to this rank goes back to it.
        within = {
            "experts.counts": chunks * (MANY.num_experts // NODES) // 2 * COUNT,
            "experts.dispatch": handed * row,
            "experts.dispatch.gates": handed * ELEMENT,
            "experts.combine": taken * row,
            "experts.combine.backward": handed * row,
            "experts.dispatch.backward": taken * row,
            "experts.dispatch.backward.gates": taken * ELEMENT,
        }
        assert rank.sent("ep_within") == within
        assert rank.sent("ep") == {}


def test_a_flat_dispatch_sends_a_token_across_as_often_as_it_has_experts_there(
    rank_pool: RankPool,
) -> None:
    """The same routing: what crosses in two hops is as many rows as pairs of token and node."""
    flat = run(hop_plan(layout=ExpertLayout()), rank_pool)
    hops = run(hop_plan(), rank_pool)
    rows = pairs = 0
    row = mixture_plan().model.hidden * ELEMENT
    for place, (one, other) in enumerate(zip(flat, hops, strict=True)):
        assert torch.equal(one.chosen, other.chosen)
        rows += int((one.chosen // (MANY.num_experts // NODES) != place // 2).sum())
        pairs += other.sent("ep_across")["experts.dispatch"] // row
    tokens = sum(len(one.chosen) for one in flat)
    assert pairs == sum(crossing(place, hops) for place in range(4))
    assert pairs <= tokens * (NODES - 1) < rows


@pytest.mark.system("B10")
def test_tokens_that_are_limited_to_one_node_cross_at_most_once(rank_pool: RankPool) -> None:
    """Groups of experts as large as nodes, one of which a token may use (DeepSeek-V3)."""
    limited = replace(MANY, groups=NODES, top_groups=1)
    plan = hop_plan(experts=limited)
    row = plan.model.hidden * ELEMENT
    for place, rank in enumerate(run(plan, rank_pool)):
        assert nodes_reached(rank).sum(1).tolist() == [1] * len(rank.tokens)
        away = int((rank.chosen[:, 0] // (MANY.num_experts // NODES) != place // 2).sum())
        assert 0 < away < len(rank.tokens)
        assert rank.sent("ep_across")["experts.dispatch"] == away * row


@pytest.mark.system("B10")
def test_two_hops_and_one_give_the_same(rank_pool: RankPool) -> None:
    """Up to the order in which the outputs of the experts of a token are added up."""
    flat = run(hop_plan(layout=ExpertLayout()), rank_pool)
    hops = run(hop_plan(), rank_pool)
    again = run(hop_plan(), rank_pool)
    for one, other, same in zip(flat, hops, again, strict=True):
        torch.testing.assert_close(one.out, other.out, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(one.dx, other.dx, rtol=1e-12, atol=1e-13)
        assert torch.equal(other.out, same.out)
        assert torch.equal(other.dx, same.dx)
        assert one.arrived == other.arrived
