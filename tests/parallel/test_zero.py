"""ZeRO: what is whole and when, in every stage; what travels, and in what order."""

from __future__ import annotations

import itertools

import pytest

from echelon.core.plan import Plan, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import plan_buckets, stage_units
from echelon.layout.stage import rank_part
from tests.parallel import targets
from tests.parallel.layouts import QWEN, plan_of
from tests.parallel.targets import Trained

SLICES = Zero(stage=3, accumulate="slices")


def train(rank_pool: RankPool, plan: Plan, steps: int = 2) -> list[Trained]:
    """Take steps on the ranks of a plan."""
    return rank_pool.run(targets.train, (plan, steps), world_size=plan.mesh.world_size)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_first_reduce_scatter_starts_before_the_last_gradient_exists(
    rank_pool: RankPool, stage: int, microbatches: int
) -> None:
    accumulate = "whole" if stage == 1 else "slices"
    zero = Zero(stage=stage, accumulate=accumulate)  # type: ignore[arg-type]
    plan = plan_of(dp_shard=2, zero=zero, microbatches=microbatches, bucket_bytes=2000)
    for rank in train(rank_pool, plan):
        order = rank.order
        launches = [index for index, (what, _) in enumerate(order) if what == "launch"]
        ready = [index for index, (what, _) in enumerate(order) if what == "ready"]
        assert launches[0] < ready[-1]
        sums = [event for event in rank.events[1] if event.kind == "reduce_scatter"]
        last_backward = [event for event in rank.events[1] if event.kind == "BW"][-1]
        assert sums[0].start < last_backward.end


def test_stages_1_and_2_send_parameters_while_the_next_forward_runs(rank_pool: RankPool) -> None:
    plan = plan_of(dp_shard=2, zero=Zero(stage=1), bucket_bytes=2000)
    for rank in train(rank_pool, plan):
        events = rank.events[1]
        gathers = [event for event in events if event.name.startswith("parameters.")]
        forward = next(event for event in events if event.kind == "F")
        # Those of step 0 were awaited in step 1, one after the other, as forward came to them.
        assert {event.name for event in gathers} == {
            f"parameters.{bucket.name}" for bucket in plan_buckets(plan, rank_part(plan, 0))
        }
        assert all(event.start < forward.start for event in gathers)
        assert all(forward.start < event.end < forward.end for event in gathers)


@pytest.mark.system("S24")
def test_stage_3_has_the_next_gather_in_flight_while_a_unit_computes(rank_pool: RankPool) -> None:
    plan = plan_of(dp_shard=2, zero=SLICES, microbatches=1)
    units = stage_units(rank_part(plan, 0))
    for rank in train(rank_pool, plan):
        gathers = [event for event in rank.events[1] if event.name.startswith("parameters.")]
        forward = gathers[: len(units)]
        for one, after in itertools.pairwise(forward):
            assert after.start < one.end
        backward = gathers[len(units) :]
        assert len(backward) == len(units) - 1
        for one, after in itertools.pairwise(backward):
            assert after.start < one.end


@pytest.mark.system("S23")
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_one_unit_and_those_ahead_are_whole(rank_pool: RankPool, prefetch: int) -> None:
    zero = Zero(stage=3, accumulate="slices", prefetch=prefetch)
    for rank in train(rank_pool, plan_of(dp_shard=2, zero=zero)):
        assert rank.most_whole == 1 + prefetch


def test_a_tied_embedding_stays_whole_from_its_lookup_to_the_loss(rank_pool: RankPool) -> None:
    for rank in train(rank_pool, plan_of(dp_shard=2, zero=SLICES, model=QWEN)):
        assert rank.most_whole == 3


@pytest.mark.system("S22")
@pytest.mark.parametrize(
    ("zero", "most"),
    [
        (Zero(stage=2, accumulate="slices"), 3),
        (Zero(stage=3, accumulate="slices"), 3),
    ],
)
def test_whole_gradients_exist_bucket_by_bucket(rank_pool: RankPool, zero: Zero, most: int) -> None:
    plan = plan_of(dp_shard=2, zero=zero, microbatches=2, bucket_bytes=2000)
    assert len(plan_buckets(plan, rank_part(plan, 0))) > most
    for rank in train(rank_pool, plan):
        assert 0 < rank.most_gradients <= most
