"""Data parallelism: buckets leave while backward runs, once per step; replicas stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan, Precision, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from tests.parallel import mirror_targets, targets
from tests.parallel.layouts import QWEN, plan_of
from tests.parallel.pipeline.pipelines import pipeline_plan
from tests.parallel.targets import Trained

CAST = Precision(parameters="bf16", gradients="bf16", reduction="fp32", master="fp32")


def train(rank_pool: RankPool, plan: Plan, steps: int = 1) -> list[Trained]:
    """Take steps on the ranks of a plan."""
    return rank_pool.run(targets.train, (plan, steps), world_size=plan.mesh.world_size)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_bucket_leaves_as_soon_as_its_last_gradient_is_ready(
    rank_pool: RankPool, microbatches: int
) -> None:
    plan = plan_of(dp=2, microbatches=microbatches, bucket_bytes=2000)
    buckets = plan_buckets(plan, rank_part(plan, 0))
    assert len(buckets) >= 4
    for rank in train(rank_pool, plan):
        order = rank.order
        launches = [index for index, (what, _) in enumerate(order) if what == "launch"]
        assert [order[index][1] for index in launches] == [bucket.name for bucket in buckets]
        for bucket, index in zip(buckets, launches, strict=True):
            assert order[index - 1][0] == "ready"
            assert order[index - 1][1] in bucket.names
        # The first one leaves before the gradients of all other buckets are ready.
        later = {name for bucket in buckets[1:] for name in bucket.names}
        assert {name for what, name in order[launches[0] :] if what == "ready"} == later


@pytest.mark.system("S02")
def test_the_first_all_reduce_starts_before_backward_ends(rank_pool: RankPool) -> None:
    for rank in train(rank_pool, plan_of(dp=2, bucket_bytes=2000)):
        sums = [event for event in rank.events[0] if event.name.startswith("gradients.")]
        last_backward = [event for event in rank.events[0] if event.kind == "BW"][-1]
        assert sums[0].start < sums[-1].start < last_backward.end


@pytest.mark.system("S03")
@pytest.mark.parametrize("microbatches", [1, 4])
def test_accumulation_sums_over_ranks_once_per_step(rank_pool: RankPool, microbatches: int) -> None:
    plan = plan_of(dp=2, microbatches=microbatches)
    buckets = plan_buckets(plan, rank_part(plan, 0))
    for rank in train(rank_pool, plan, steps=2):
        for step in rank.events:
            data = [(event.kind, event.name) for event in step if event.axis == "dp"]
            assert data == [
                ("all_gather", "tokens"),
                *(("all_reduce", f"gradients.{bucket.name}") for bucket in buckets),
            ]


def test_fewer_collectives_than_parameters_and_the_same_gradients(rank_pool: RankPool) -> None:
    small = train(rank_pool, plan_of(dp=2, bucket_bytes=64))[0]
    large = train(rank_pool, plan_of(dp=2, bucket_bytes=2**20))[0]
    counts = [
        sum(event.name.startswith("gradients.") for event in rank.events[0])
        for rank in (small, large)
    ]
    assert counts[1] == 1 < counts[0] < len(small.parameters)
    for name, shards in small.gradients[0].items():
        other = large.gradients[0][name][0].tensor
        assert torch.equal(shards[0].tensor, other)


@pytest.mark.system("S01")
def test_replicas_read_other_samples_and_stay_bitwise_equal(rank_pool: RankPool) -> None:
    plan = plan_of(dp=2, dp_shard=2, model=QWEN, dtype="fp32", microbatches=2)
    ranks = train(rank_pool, plan, steps=3)
    samples = [id_ for rank in ranks for id_ in rank.samples[0]]
    assert len(samples) == len(set(samples)) == plan.mathematics.global_sequences
    for rank in ranks[1:]:
        assert rank.losses == ranks[0].losses
        assert rank.norms == ranks[0].norms
        for name, shards in ranks[0].parameters.items():
            assert torch.equal(shards[0].tensor, rank.parameters[name][0].tensor)


@pytest.mark.system("S01")
def test_parameters_are_never_sent(rank_pool: RankPool) -> None:
    for rank in train(rank_pool, plan_of(dp=2), steps=2):
        assert {event.kind for event in rank.events[1] if event.axis} == {
            "all_gather",
            "all_reduce",
        }
        gathered = [e.name for e in rank.events[1] if e.kind == "all_gather"]
        assert sorted(gathered) == ["step", "tokens"]


@pytest.mark.parametrize(
    "changes",
    [{"precision": CAST}, {"dp_shard": 2, "zero": Zero(stage=2, accumulate="slices")}],
    ids=["summed in another dtype", "slices that add up"],
)
def test_nothing_is_kept_for_the_mirror_but_the_sums(
    rank_pool: RankPool, changes: dict[str, Any]
) -> None:
    plan = pipeline_plan("dualpipe", 2, **changes)
    for kept in rank_pool.run(
        mirror_targets.kept_for_the_mirror, plan, world_size=plan.mesh.world_size
    ):
        assert kept
        assert not any(kept)
