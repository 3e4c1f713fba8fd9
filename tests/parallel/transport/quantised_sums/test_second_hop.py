"""The second hop of a sum travels while backward goes on, and changes no bit by that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from echelon.config.load import load_job
from echelon.core.plan import Plan, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.proof.claims.claims import SAME_BITS
from echelon.proof.run import prove
from echelon.rehearsal.order import Entry, Issue, Wait
from echelon.rehearsal.rank import rehearse_rank
from echelon.rehearsal.run import on_nccl, rehearse
from tests.parallel.layouts import NANO, plan_of
from tests.parallel.secondary.nodes import on_nodes
from tests.parallel.targets import train
from tests.parallel.transport.quantised_sums.targets import train_awaited
from tests.parallel.transport.quantised_sums.test_quantised_sums import STEPS, rounded_plan

WIDE = ("mesh.dp_shard=16", "batch.global_sequences=32", "cluster.preset=16xh100")
PIPE = (*WIDE[:1], "batch.global_sequences=64", "cluster.preset=32xh100", "mesh.pp=2")
CODES = ("zero.stage=3", "zero.reduce=int8")
MIXED = ("model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=96")


def rounded_nano(*, layers: int) -> Plan:
    """Return a plan of two nodes of two ranks, with gradients in fp64 slices."""
    zero = Zero(stage=3, accumulate="slices", reduce="int8")
    return on_nodes(plan_of(model=replace(NANO, layers=layers), dp_shard=4, zero=zero), 2)


def exchanges(entries: Sequence[Entry], members: int) -> list[tuple[str, int]]:
    """Return the sums of the second step of a rank over so many members, and where they begin."""
    found = [
        (one.name, place)
        for place, one in enumerate(entries)
        if isinstance(one, Issue)
        and one.kind == "all_to_all"
        and one.name.startswith("gradients.")
        and len(one.members) == members
    ]
    return found[len(found) // 2 :]


def test_a_second_hop_is_under_way_while_the_next_buckets_fill() -> None:
    entries = rehearse_rank(on_nccl(load_job("nano", (*WIDE, *CODES)).plan), 0).entries
    first, second = exchanges(entries, 8), exchanges(entries, 2)
    assert len(first) >= 5
    # The same order in the node and across: no rank can come to them in another.
    assert [name for name, _ in first] == [name for name, _ in second]
    awaited = {one.issue: place for place, one in enumerate(entries) if isinstance(one, Wait)}
    for place, (_, begins) in enumerate(second[:-1]):
        # It begins as soon as the next bucket has set out in its node, not where it is awaited.
        assert first[place + 1][1] < begins < awaited[begins]
        assert awaited[first[place][1]] < begins
    for place, (_, begins) in enumerate(second[:-2]):
        # The first hop of the bucket after the next sets out beside it.
        assert begins < first[place + 2][1] < awaited[begins]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2x2", "experts"])
def test_sums_that_are_awaited_at_once_have_the_same_bits(name: str, rank_pool: RankPool) -> None:
    plan = STEPS[name]
    if name == "2x2":
        plan = rounded_nano(layers=4)
    apart, at_once = (
        rank_pool.run(target, (plan, 2), plan.mesh.world_size) for target in (train, train_awaited)
    )
    for one, other in zip(apart, at_once, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        for step, same in zip(one.gradients, other.gradients, strict=True):
            assert step.keys() == same.keys()
            for key, shards in step.items():
                pairs = zip(shards, same[key], strict=True)
                assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs), key


@pytest.mark.slow
def test_late_completion_finds_the_same_bits_and_no_race(rank_pool: RankPool) -> None:
    plan = rounded_plan(dp=4, each=2, stage=2)
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False, late=True)
    proof.require()
    exact, rounded = (one for one in proof.passes[0].claims if one.rule.id == "prove-late")
    assert exact.statement != rounded.statement == SAME_BITS
    assert exact.compared > rounded.compared > 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((*PIPE, "zero.secondary=true"), id="pipeline, secondary"),
        pytest.param((*WIDE, *MIXED, "mesh.ep=2"), id="experts", marks=pytest.mark.slow),
    ],
)
def test_no_order_of_hops_can_hang(settings: tuple[str, ...]) -> None:
    rehearse(load_job("nano", (*settings, *CODES)).plan, workers=1).require()
