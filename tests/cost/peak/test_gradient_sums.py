"""Buckets that fill and are summed: how many bytes they are after each gradient."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.peak.gradient_sums import GradientSums, SummedBucket
from echelon.layout.buckets import BucketPlan, plan_buckets
from echelon.layout.stage import rank_part

ZERO3 = ("mesh.dp_shard=2", "zero.stage=3")
RING = ("collectives.algorithm=ring", "model.tied=false")
OVER_NCCL = ("cluster.preset=8xh100", "model.tied=false")


def plan_of(*flags: str) -> Plan:
    return load_job("nano", flags).plan


def sums_of(plan: Plan) -> tuple[GradientSums, tuple[BucketPlan, ...]]:
    part = rank_part(plan, 0)
    buckets = plan_buckets(plan, part)
    return GradientSums(plan, part, buckets), buckets


def test_a_bucket_is_whole_until_the_third_sum_after_it() -> None:
    sums, buckets = sums_of(plan_of(*ZERO3, *OVER_NCCL))
    sums.start_backward(0, last=False)
    sizes = [4 * one.num_elements for one in buckets]
    for place, one in enumerate(buckets):
        for name in one.names:
            sums.write(name)
        # The slice of the first microbatch is its own place: nothing is added.
        assert sums.bytes == sum(sizes[max(0, place - 1) : place + 1])
    sums.finish()
    assert sums.bytes == 0
    assert sums.most() == max(sum(sizes[i : i + 3]) for i in range(len(sizes)))


def test_slices_of_later_microbatches_wait_to_be_added() -> None:
    # Over NCCL: over Gloo a rank adds up what the others send it.
    plan = plan_of(*ZERO3, *OVER_NCCL)
    sums, buckets = sums_of(plan)
    first = buckets[0]
    for _ in range(2):
        sums.finish()
        sums.start_backward(0, last=False)
        assert sums.takes_part
        for name in first.names:
            sums.write(name)
    assert sums.bytes == 4 * first.num_elements + 2 * first.num_elements


def test_whole_gradients_have_nothing_beside_until_the_last_microbatch() -> None:
    flags = ("mesh.dp_replicate=2", "precision.parameters=bf16", "precision.gradients=bf16")
    sums, buckets = sums_of(plan_of(*flags))
    for last in (False, True):
        sums.start_backward(0, last=last)
        assert sums.takes_part is last
        for name in buckets[0].names:
            sums.write(name)
        # The copy that is summed, in float32.
        assert sums.bytes == last * 4 * buckets[0].num_elements
    sums.finish()
    assert sums.bytes == 0


def test_what_nobody_shares_is_cast_for_a_moment_only() -> None:
    experts = ("model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=96")
    low = ("precision.parameters=bf16", "precision.gradients=bf16")
    plan = plan_of(*experts, *low, *ZERO3, "mesh.ep=2")
    part = rank_part(plan, 0)
    found = [SummedBucket.from_plan(plan, part, one) for one in plan_buckets(plan, part)]
    assert {one.alone for one in found if one.plan.expert} == {True}
    assert {one.alone for one in found if not one.plan.expert} == {False}
    assert all(one.casts and one.cast == 4 * one.plan.num_elements for one in found)


def test_what_messages_bring_lands_beside_until_backward_is_over() -> None:
    sums, buckets = sums_of(plan_of("mesh.dp_replicate=2", *RING))
    sums.start_backward(0, last=True)
    for place, one in enumerate(buckets):
        for name in one.names:
            sums.write(name)
        # A ring of two brings one half; sums of a group come one at a time.
        assert sums.bytes == 4 * max(-(-other.num_elements // 2) for other in buckets[: place + 1])
    sums.finish()
    assert sums.bytes == 0


def test_gradients_of_a_bucket_may_be_written_together() -> None:
    plan = plan_of(*ZERO3, *OVER_NCCL)
    (apart, buckets), (together, _) = sums_of(plan), sums_of(plan)
    for last in (False, True):
        for sums in (apart, together):
            sums.start_backward(0, last=last)
        for bucket in buckets:
            for name in bucket.names:
                apart.write(name)
            together.write(bucket.names[0], len(bucket.names))
            assert apart.state() == together.state()
            assert apart.most() == together.most()


def test_sums_go_back_to_a_state() -> None:
    sums, buckets = sums_of(plan_of(*ZERO3, *OVER_NCCL))
    found: list[list[int]] = []
    before = sums.state()
    for _ in range(2):
        sums.start_backward(0, last=True)
        for bucket in buckets:
            sums.write(bucket.names[0], len(bucket.names))
        found.append([sums.bytes, sums.most()])
        assert sums.state() != before
        sums.restore(before)
        assert sums.state() == before
    assert found[0] == found[1]


def test_a_second_hop_takes_the_place_of_the_first_with_the_sum_after_it() -> None:
    nodes = ("cluster.preset=16xh100", "model.tied=false", "batch.global_sequences=32")
    hops = ("mesh.dp_shard=16", "zero.stage=3", "zero.reduce=int8")
    plan = plan_of(*nodes, *hops)
    sums, buckets = sums_of(plan)
    made = [SummedBucket.from_plan(plan, rank_part(plan, 0), one) for one in buckets]
    assert all(0 < one.far < one.others for one in made)
    sums.start_backward(0, last=True)
    for place, one in enumerate(buckets):
        sums.write(one.names[0], len(one.names))
        # Of the three last sums one is in its first hop, one in its second, and one has ended.
        before = made[place - 1].whole + made[place - 1].far if place else 0
        assert sums.bytes == made[place].whole + made[place].others + before
    sums.finish()
    assert sums.bytes == 0
