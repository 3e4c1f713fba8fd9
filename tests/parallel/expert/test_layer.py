"""A mixture of experts over ranks equals that of one device, whatever way tokens take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from echelon.config.load import load_job
from echelon.core.errors import InfeasiblePlan
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.plan import Plan
from echelon.cost.bytes.expert_sent import dispatch_bytes
from echelon.launch.local.supervisor import RankPool
from echelon.layout.expert_load import expert_load_from_routing
from echelon.layout.stage import part_of
from tests.parallel.expert import targets as expert_targets
from tests.parallel.expert.targets import (
    EXPERTS,
    Mixed,
    Stream,
    mixture_plan,
    one_device,
    stream_of,
)
from tests.parallel.layouts import DEEPSEEK
from tests.parallel.one_device import assemble

SPLITS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ep2": {"dp_shard": 2, "ep": 2},
    "ep4": {"dp_shard": 4, "ep": 4},
    "ep2 of 4 data ranks": {"dp_shard": 4, "ep": 2},
    "ep2, two replicas": {"dp": 2, "dp_shard": 2, "ep": 2},
    "ep2 over tp": {"tp": 2, "ep": 2},
    "ep4 over tp, scattered": {"dp_shard": 2, "tp": 2, "ep": 4, "sequence_parallel": True},
    "ep4 over cp and tp": {"cp": 2, "tp": 2, "ep": 4},
    "pieces": {"dp_shard": 2, "tp": 2, "ep": 2, "layout": ExpertLayout(expert_tp=2)},
    "pieces, scattered": {
        "cp": 2,
        "tp": 2,
        "ep": 2,
        "sequence_parallel": True,
        "layout": ExpertLayout(expert_tp=2),
    },
}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flat": ({}, {}),
    "flat, chunks": ({"chunks": 4}, {"capacity_factor": 1.0}),
    "padded": ({"padded": True}, {"capacity_factor": 1.0}),
    "padded, chunks": ({"padded": True, "chunks": 4}, {"capacity_factor": 1.5, "drop": "score"}),
    "two hops": ({"dispatch": "two-hop"}, {}),
    "two hops, chunks": ({"dispatch": "two-hop", "chunks": 4}, {"capacity_factor": 1.0}),
}
EXPERT_AXES = ("ep", "ep_across", "ep_within")
PAIRS = [
    (split, way)
    for split, chosen in SPLITS.items()
    for way, (layout, _) in WAYS.items()
    # Two hops want two nodes of two ranks each.
    if "dispatch" not in layout or chosen.get("ep", 1) == 4
]
ROUTES = ("scores", "even", "one", "not-last")


def planned(split: str, way: str, **balance: Any) -> Plan:
    """Return the plan of a split whose tokens go one of the ways."""
    layout, room = WAYS[way]
    chosen = SPLITS[split]
    experts = replace(chosen.get("layout", ExpertLayout()), **layout)
    nodes = 2 if experts.dispatch == "two-hop" else 1
    settings = {**chosen, "layout": experts, "balance": Balance(**{**room, **balance})}
    return mixture_plan(nodes=nodes, **settings)


def run(plan: Plan, stream: Stream, pool: RankPool) -> list[Mixed]:
    return pool.run(expert_targets.mix, (plan, stream), world_size=plan.mesh.world_size)


def equals_one_device(plan: Plan, ranks: list[Mixed], stream: Stream) -> None:
    """Assert that outputs, gradients and choices are those of one device, token by token."""
    wanted = one_device(plan, stream)
    for name in ("out", "dx"):
        for rank in ranks:
            expected = getattr(wanted, name)[rank.rows]
            torch.testing.assert_close(getattr(rank, name), expected, rtol=1e-11, atol=1e-12)
    found = assemble(plan, [rank.gradients for rank in ranks])
    for name, value in wanted.gradients.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)
    length, size = plan.mathematics.sequence_length, plan.layout.microbatch_sequences
    assert int(wanted.routed.kept_NK.sum()) > 0
    routed = sum(int(rank.kept.sum()) for rank in ranks)
    assert routed == int(wanted.routed.kept_NK.sum())
    assert sum(len(rank.tokens) for rank in ranks) == length * size * plan.mesh.dp


def sends_what_is_stated(plan: Plan, ranks: list[Mixed], stream: Stream) -> None:
    """Assert that each rank sends tokens for as many bytes as the formulas say of this routing."""
    routed = one_device(plan, stream).routed
    chosen_NK = routed.chosen_NK.masked_fill(~routed.kept_NK, -1)
    sequences = plan.mathematics.global_sequences
    chosen_BTK = chosen_NK.unflatten(0, (-1, sequences)).transpose(0, 1).numpy()
    for place, rank in enumerate(ranks):
        stated: Counter[str] = Counter()
        load = expert_load_from_routing(plan, place, {0: chosen_BTK})
        for term in dispatch_bytes(plan, part_of(plan, place), load):
            stated[str(term.axis)] += term.bytes
        for axis in EXPERT_AXES:
            assert sum(rank.sent(axis).values()) == stated[axis], (place, axis)


@pytest.mark.system("S34")
@pytest.mark.one_in(12)
@pytest.mark.parametrize(("split", "way"), PAIRS)
def test_outputs_and_gradients_are_those_of_one_device(
    split: str, way: str, rank_pool: RankPool
) -> None:
    plan = planned(split, way)
    stream = stream_of(plan)
    ranks = run(plan, stream, rank_pool)
    equals_one_device(plan, ranks, stream)
    sends_what_is_stated(plan, ranks, stream)


@pytest.mark.system("S34")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("way", WAYS)
def test_experts_may_get_all_tokens_or_none(way: str, route: str, rank_pool: RankPool) -> None:
    """A rank whose experts get nothing has no rows, a gradient of zero, and no one waits for it."""
    plan = planned("ep4", way, route=route)
    stream = stream_of(plan)
    ranks = run(plan, stream, rank_pool)
    equals_one_device(plan, ranks, stream)
    sends_what_is_stated(plan, ranks, stream)
    found = assemble(plan, [rank.gradients for rank in ranks])
    counts = ranks[0].load.counts
    assert all(rank.load.counts == counts for rank in ranks)
    idle = [expert for expert, count in enumerate(counts) if count == 0]
    assert idle == {"one": list(range(2, 8)), "not-last": [7]}.get(route, [])
    for expert in idle:
        for part in ("gate", "up", "down"):
            assert not found[f"layers.0.mlp.experts.{expert}.{part}.weight"].any()
    if route == "one" and not plan.layout.experts.padded:
        assert all(sum(map(sum, rank.arrived)) == 0 for rank in ranks[1:])


@pytest.mark.parametrize("split", ["ep2", "ep4", "ep4 over cp and tp", "pieces"])
def test_a_router_of_sigmoids_with_groups_does_the_same(split: str, rank_pool: RankPool) -> None:
    assert DEEPSEEK.experts is not None
    experts = replace(DEEPSEEK.experts, first_dense_layers=0)
    plan = mixture_plan(experts=experts, **SPLITS[split])
    stream = stream_of(plan)
    equals_one_device(plan, run(plan, stream, rank_pool), stream)


@pytest.mark.parametrize(("split", "way"), [*product(SPLITS, ["flat"]), ("ep4", "padded, chunks")])
def test_biases_are_added_once_and_get_all_of_their_gradients(
    split: str, way: str, rank_pool: RankPool
) -> None:
    """Those of logits and of experts, with a clamped SwiGLU whose limit some rows are beyond."""
    experts = replace(EXPERTS, shared_experts=0, bias=True, logit_bias=True, limit=1.0, alpha=1.3)
    layout, room = WAYS[way]
    chosen = SPLITS[split]
    placed = replace(chosen.get("layout", ExpertLayout()), **layout)
    plan = mixture_plan(experts=experts, **{**chosen, "layout": placed, "balance": Balance(**room)})
    stream = stream_of(plan)
    equals_one_device(plan, run(plan, stream, rank_pool), stream)


def test_a_skewed_load_shows_where_it_is(rank_pool: RankPool) -> None:
    """All tokens at two of eight experts: four times the mean, and one rank gets all rows."""
    plan = planned("ep4", "flat", route="one")
    ranks = run(plan, stream_of(plan), rank_pool)
    tokens = plan.mathematics.global_sequences * plan.mathematics.sequence_length
    for rank in ranks:
        assert rank.load.counts == (tokens, tokens, 0, 0, 0, 0, 0, 0)
        assert rank.load.imbalance == EXPERTS.num_experts / EXPERTS.top_k
    assert [sum(rank.arrived[0]) for rank in ranks] == [2 * tokens, 0, 0, 0]


@pytest.mark.system("S35")
@pytest.mark.parametrize("drop", ["position", "score"])
def test_every_layout_drops_the_same_and_counts_it(drop: Any, rank_pool: RankPool) -> None:
    """Of 8 tokens of a sequence at each of two experts 2 have room; all layouts know which."""
    kept: list[dict[int, list[bool]]] = []
    for split in ("one rank", "ep2 over tp", "ep4 over cp and tp", "pieces, scattered"):
        plan = planned(split, "flat", capacity_factor=1.0, drop=drop, route="one")
        ranks = run(plan, stream_of(plan), rank_pool)
        sequences, length = plan.mathematics.global_sequences, plan.mathematics.sequence_length
        room = plan.mathematics.balance.capacity(length, EXPERTS.num_experts, EXPERTS.top_k)
        assert room == 2
        assert all(r.load.dropped == sequences * EXPERTS.top_k * (length - 2) for r in ranks)
        kept.append(
            {int(t): row for r in ranks for t, row in zip(r.tokens, r.kept.tolist(), strict=True)}
        )
        if drop == "position":
            assert {t % length for t, row in kept[-1].items() if all(row)} == {0, 1}
    assert all(one == kept[0] for one in kept)


SAME_BATCHES = (
    ("one rank", "ep2 over tp", "ep4 over cp and tp", "pieces, scattered"),
    ("ep2", "ep4 over tp, scattered", "pieces"),
    ("ep4", "ep2 of 4 data ranks", "ep2, two replicas"),
)
"""Layouts with the same sequences, cut among one, two and four data ranks."""


@pytest.mark.parametrize("splits", SAME_BATCHES)
def test_every_layout_sends_the_same_tokens_to_the_same_experts(
    splits: tuple[str, ...], rank_pool: RankPool
) -> None:
    found: list[dict[int, tuple[int, ...]]] = []
    for split in splits:
        plan = planned(split, "flat")
        ranks = run(plan, stream_of(plan), rank_pool)
        found.append(
            {
                int(token): tuple(row)
                for rank in ranks
                for token, row in zip(rank.tokens, rank.chosen.tolist(), strict=True)
            }
        )
    assert all(one == found[0] for one in found)
    assert len(found[0]) == planned(splits[0], "flat").tokens_per_step
    assert len(set(found[0].values())) > 8


@pytest.mark.parametrize("route", ["scores", "one"])
@pytest.mark.parametrize("way", ["flat", "two hops, chunks"])
def test_exchanges_in_batches_as_nccl_runs_them_bring_the_same(
    way: str, route: str, rank_pool: RankPool
) -> None:
    plan = planned("ep4", way, route=route)
    stream = stream_of(plan)
    target, argument = expert_targets.mix_in_batches_of_messages, (plan, stream)
    equals_one_device(plan, rank_pool.run(target, argument, world_size=4), stream)


@pytest.mark.parametrize("way", ["flat", "padded", "two hops"])
def test_a_token_that_is_not_a_number_spoils_no_other(way: str, rank_pool: RankPool) -> None:
    """Nobody hangs, and all outputs but its own are what they are without it."""
    plan = planned("ep4", way, drop="position", capacity_factor=None if way == "flat" else 4.0)
    stream = stream_of(plan)
    argument = (plan, stream)
    world_size = plan.mesh.world_size
    ranks = rank_pool.run(expert_targets.mix_not_a_number, argument, world_size=world_size)
    wanted = one_device(plan, stream)
    for rank in ranks:
        spoilt = rank.rows == 1
        assert bool(rank.out[spoilt].isnan().all())
        torch.testing.assert_close(
            rank.out[~spoilt], wanted.out[rank.rows[~spoilt]], rtol=1e-11, atol=1e-12
        )
    assert sum(int((rank.rows == 1).sum()) for rank in ranks) == 1


@pytest.mark.parametrize(
    ("sets", "rule"),
    [
        (("mesh.ep=3", "mesh.dp_shard=3"), "ep-divides-experts"),
        (("mesh.ep=4", "mesh.dp_shard=2"), "ep-divides-ranks"),
        (("mesh.ep=2", "mesh.dp_shard=2", "experts.chunks=7"), "chunks-divide-tokens"),
        (("mesh.ep=2", "mesh.dp_shard=2", "experts.dispatch=two-hop"), "two-hop-needs-nodes"),
        (("mesh.ep=2", "mesh.dp_shard=2", "experts.padded=true"), "padded-needs-capacity"),
        (("mesh.tp=2", "experts.expert_tp=4"), "expert-tp-is-one-or-tp"),
    ],
)
def test_a_wrong_degree_is_refused_by_its_rule(sets: tuple[str, ...], rule: str) -> None:
    model = ("num_experts=8", "top_k=2", "ffn=96")
    with pytest.raises(InfeasiblePlan) as refused:
        load_job("nano", [*(f"model.experts.{one}" for one in model), *sets])
    assert rule in {problem.rule for problem in refused.value.problems}
