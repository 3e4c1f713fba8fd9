"""Units of parameters are whole from their gather to their release."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.bytes.transient import most_whole_bytes
from echelon.cost.peak.buckets import GradientSums, SummedBucket, WholeUnits
from echelon.layout.buckets import BucketPlan, plan_buckets, stage_units
from echelon.layout.stage import rank_part

ZERO3 = ("mesh.dp_shard=2", "zero.stage=3")
OFFLOAD = ("zero.parameter_offload=host", "zero.optimizer_offload=host")


def plan_of(*flags: str) -> Plan:
    return load_job("nano", (*ZERO3, *flags)).plan


def run(plan: Plan) -> tuple[WholeUnits, list[int]]:
    """Run forward and backward; return the bytes in each unit."""
    part = rank_part(plan, 0)
    whole, units = WholeUnits(plan, part, plan_buckets(plan, part)), stage_units(part)
    found: list[int] = []
    for unit in units:
        whole.enter(unit)
        found.append(whole.bytes)
        whole.leave(unit)
    for unit in units[::-1]:
        whole.enter_backward(unit)
        found.append(whole.bytes)
        whole.leave_backward(unit)
    return whole, found


def test_the_most_is_what_the_bound_says() -> None:
    for flags in ((), ("zero.prefetch=2",), ("zero.unit_blocks=2",), ("model.tied=true",)):
        plan = plan_of(*flags)
        part = rank_part(plan, 0)
        whole, found = run(plan)
        assert max(found) == most_whole_bytes(plan, part, plan_buckets(plan, part)), flags
        assert whole.bytes == 0


def test_what_is_never_freed_stays_until_the_step_ends() -> None:
    whole, found = run(plan_of("zero.reshard_after_forward=never"))
    assert found == sorted(found)
    assert whole.bytes == found[-1] > 0
    whole.end_pass()
    assert whole.bytes == 0


def test_slices_that_rest_on_the_host_are_read_a_unit_ahead() -> None:
    assert run(plan_of())[0].most_reads == 0
    whole, _ = run(plan_of("model.tied=false", *OFFLOAD))
    # The unit in use and the one that is gathered give theirs up; the next one is read.
    assert whole.most_reads == 3


def test_stages_without_slices_gather_nothing() -> None:
    plan = load_job("nano", ("mesh.dp_shard=2", "zero.stage=2")).plan
    whole, found = run(plan)
    assert not whole.any
    assert set(found) == {0}


def test_codes_are_one_byte_of_a_number_and_all_else_four() -> None:
    flags = ("precision.matmul=fp8", "precision.fp8_block=32", "zero.prefetch=0")
    plain, coded = plan_of(*flags), plan_of(*flags, "zero.gather=fp8")
    part = rank_part(plain, 0)
    weights = [one for one in plan_buckets(coded, part) if one.fp8_squares and part.blocks]
    assert len(weights) == len(part.blocks)
    most = [max(run(plan)[1][: len(part.blocks)]) for plan in (plain, coded)]
    assert most[0] > most[1]
    small = {one.units: one for one in plan_buckets(coded, part) if not one.fp8_squares}
    block = weights[0]
    assert small[block.units].num_elements < block.num_elements // 32
    found = most_whole_bytes(coded, part, [block, small[block.units]])
    assert found == block.num_elements + 4 * small[block.units].num_elements


RING = ("collectives.algorithm=ring", "model.tied=false")
OVER_NCCL = ("cluster.preset=8xh100", "model.tied=false")


def summed_plan(*flags: str) -> Plan:
    return load_job("nano", flags).plan


def sums_of(plan: Plan) -> tuple[GradientSums, tuple[BucketPlan, ...]]:
    part = rank_part(plan, 0)
    buckets = plan_buckets(plan, part)
    return GradientSums(plan, part, buckets), buckets


def test_a_bucket_is_whole_until_the_third_sum_after_it() -> None:
    sums, buckets = sums_of(summed_plan(*ZERO3, *OVER_NCCL))
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
    plan = summed_plan(*ZERO3, *OVER_NCCL)
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
    sums, buckets = sums_of(summed_plan(*flags))
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
    plan = summed_plan(*experts, *low, *ZERO3, "mesh.ep=2")
    part = rank_part(plan, 0)
    found = [SummedBucket.from_plan(plan, part, one) for one in plan_buckets(plan, part)]
    assert {one.alone for one in found if one.plan.expert} == {True}
    assert {one.alone for one in found if not one.plan.expert} == {False}
    assert all(one.casts and one.cast == 4 * one.plan.num_elements for one in found)


def test_what_messages_bring_lands_beside_until_backward_is_over() -> None:
    sums, buckets = sums_of(summed_plan("mesh.dp_replicate=2", *RING))
    sums.start_backward(0, last=True)
    for place, one in enumerate(buckets):
        for name in one.names:
            sums.write(name)
        # A ring of two brings one half; sums of a group come one at a time.
        assert sums.bytes == 4 * max(-(-other.num_elements // 2) for other in buckets[: place + 1])
    sums.finish()
    assert sums.bytes == 0


def test_gradients_of_a_bucket_may_be_written_together() -> None:
    plan = summed_plan(*ZERO3, *OVER_NCCL)
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
    sums, buckets = sums_of(summed_plan(*ZERO3, *OVER_NCCL))
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
    plan = summed_plan(*nodes, *hops)
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
