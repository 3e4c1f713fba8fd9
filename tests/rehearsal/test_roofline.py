"""The roofline of a rehearsal: seconds of the counted work, and what binds them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.peak.rank_peak import with_few_microbatches
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.kernels import kernel_seconds
from echelon.planner.predict.estimate import estimate_plan
from echelon.rehearsal.rank import RankRehearsal, rehearse_rank
from echelon.rehearsal.roofline import (
    BINDS,
    COMMUNICATION,
    LAUNCHES,
    PIPELINE,
    Roofline,
    roofline_of_plan,
)
from echelon.rehearsal.run import on_nccl, rehearse
from echelon.rehearsal.work import KernelWork, Product, Work

BASE = ("model.layers=2", "batch.sequence_length=4096", "recompute.policy=none")
ALONE = (*BASE, "cluster.preset=1xh200", "mesh.dp_shard=1", "zero.stage=0")


def _plan(*flags: str) -> Plan:
    return load_job("llama3-8b-zero3", flags).plan


@lru_cache
def _found(*flags: str) -> tuple[Plan, Roofline]:
    plan = _plan(*flags)
    found = rehearse(plan, workers=1).roofline
    assert found is not None
    return plan, found


def _with_work(rank: RankRehearsal, **work: Work) -> RankRehearsal:
    return replace(rank, work={name.replace("outside", ""): done for name, done in work.items()})


def _work(**kernels: tuple[KernelWork, int]) -> Work:
    done = Work()
    for kernel, count in kernels.values():
        for _ in range(count):
            done.add(kernel)
    return done


@lru_cache
def _rank() -> tuple[Plan, Plan, RankRehearsal]:
    plan = _plan(*ALONE, "batch.global_sequences=6", "batch.microbatch_sequences=1")
    few = with_few_microbatches(on_nccl(plan))
    return plan, few, rehearse_rank(few, 0)


def test_kernels_take_their_seconds_as_often_as_a_step_has_them() -> None:
    plan, few, rank = _rank()
    assert (plan.num_microbatches, few.num_microbatches) == (6, 3)
    product = KernelWork("mm", 10, 5, Product(4096, 4096, 4096, 2))
    moves = KernelWork("mul", 10**9, 0)
    update = KernelWork("_fused_adamw_", 10**9, 0)
    done = _with_work(rank, F=_work(a=(product, 4), b=(moves, 8)), outside=_work(c=(update, 1)))
    found = roofline_of_plan(plan, few, [done])
    work = cost_inputs_from_plan(plan)
    times = plan.num_microbatches / few.num_microbatches
    one, _ = kernel_seconds(work, 10, product=product.product)
    moved, _ = kernel_seconds(work, 10**9)
    once, _ = kernel_seconds(work, 10**9, update=True)
    assert found.seconds["matmul"] == pytest.approx(4 * times * one)
    assert found.seconds["memory"] == pytest.approx(8 * times * moved + once)
    assert [(kernel.name, kernel.times) for kernel in found.kernels] == [
        ("mul", 16),
        ("mm", 8),
        ("_fused_adamw_", 1),
    ]
    assert [kernel.binds for kernel in found.kernels] == ["memory", "matmul", "memory"]


def test_the_rank_with_most_to_do_sets_the_pace() -> None:
    plan, few, rank = _rank()
    product = KernelWork("mm", 10, 5, Product(4096, 4096, 4096, 2))
    ranks = [
        replace(_with_work(rank, F=_work(a=(product, count))), rank=number)
        for number, count in enumerate((400, 800, 600))
    ]
    found = roofline_of_plan(plan, few, ranks)
    assert found.rank == 1
    assert found.step_s == roofline_of_plan(plan, few, ranks[1:2]).step_s


def test_where_a_host_is_slower_than_its_device_launches_bind() -> None:
    plan, few, rank = _rank()
    tiny = KernelWork("mul", 2, 0)
    found = roofline_of_plan(plan, few, [_with_work(rank, F=_work(a=(tiny, 1000)))])
    host_s = float(cost_inputs_from_plan(plan).software.host_s)
    times = 1000 * plan.num_microbatches / few.num_microbatches
    launched = found.seconds[LAUNCHES] + found.seconds["memory"]
    assert launched == pytest.approx(times * host_s)
    assert found.binds == LAUNCHES


def test_products_of_wide_elements_reach_their_own_peak() -> None:
    plan, few, rank = _rank()
    half, wide = (KernelWork("mm", 1, 1, Product(8192, 8192, 8192, size)) for size in (2, 4))
    one, other = (
        roofline_of_plan(plan, few, [_with_work(rank, F=_work(a=(kernel, 1)))]).seconds["matmul"]
        for kernel in (half, wide)
    )
    device = plan.cluster.device
    ratio = (device.flops("bf16") or 0.0) / (device.flops("fp32") or 1.0)
    assert other / one == pytest.approx(ratio)


def test_a_step_is_the_sum_of_what_binds_and_is_shown_beside_the_plan() -> None:
    plan, found = _found(*ALONE, "batch.global_sequences=6", "batch.microbatch_sequences=1")
    assert tuple(found.seconds) == BINDS
    assert found.step_s == pytest.approx(sum(found.seconds.values()))
    assert sum(map(found.share, BINDS)) == pytest.approx(1.0)
    estimate = estimate_plan(plan)
    assert found.planned_s == estimate.step_s
    assert found.mfu == pytest.approx(estimate.mfu * estimate.step_s / found.step_s)
    assert 0.0 < found.mfu < 1.0
    assert (found.seconds[COMMUNICATION], found.seconds[PIPELINE]) == pytest.approx((0.0, 0.0))
    kernels = sum(one.seconds for one in found.kernels)
    assert kernels + found.seconds[LAUNCHES] == pytest.approx(found.step_s)


def test_counted_products_and_attention_take_what_the_formulas_of_a_block_say() -> None:
    """The planner's own products of a step, without its pace: counted shapes are those it has."""
    plan, found = _found(*ALONE, "batch.global_sequences=6", "batch.microbatch_sequences=1")
    estimate = estimate_plan(plan)
    pace = float(estimate.inputs.software.pace)
    assert found.seconds["attention"] == pytest.approx(
        estimate.seconds["attention"] / pace, rel=1e-6
    )
    by_name = {one.name: one for one in found.kernels}
    counted = by_name["mm"].seconds + by_name["addmm"].seconds
    # The head's products are a term with its logits; each of its three is that of the formulas.
    assert counted > estimate.seconds["matmul"] / pace
    assert counted < (estimate.seconds["matmul"] + estimate.seconds["head"]) / pace


def test_ranks_that_send_and_wait_have_what_the_plan_says_shows_of_it() -> None:
    flags = (
        *(*BASE, "cluster.preset=4xh200", "mesh.dp_shard=1", "mesh.pp=2", "mesh.tp=2"),
        *("zero.stage=0", "batch.global_sequences=8", "batch.microbatch_sequences=1"),
    )
    plan, found = _found(*flags)
    seconds = estimate_plan(plan).seconds
    pace = float(cost_inputs_from_plan(plan).software.pace)
    shown = sum(seconds[name] for name in ("tensor", "gradients", "messages", "gather"))
    assert found.seconds[COMMUNICATION] == pytest.approx(shown / pace)
    assert found.seconds[PIPELINE] > 0.0


def test_what_rests_on_the_host_travels() -> None:
    _, here = _found(*ALONE, "batch.global_sequences=6", "batch.microbatch_sequences=1")
    flags = (*BASE, "cluster.preset=1xh200", "mesh.dp_shard=1", "zero.stage=1")
    offloaded = (*flags, "zero.optimizer_offload=host")
    _, there = _found(*offloaded, "batch.global_sequences=6", "batch.microbatch_sequences=1")
    assert here.seconds[COMMUNICATION] == 0.0
    assert there.seconds[COMMUNICATION] > 0.0


def test_processors_have_no_roofline() -> None:
    found = rehearse(load_job("nano", ()).plan, workers=1)
    assert found.roofline is None
    assert found.to_json()["roofline"] is None


def test_the_json_has_the_shares_and_the_kernels() -> None:
    _, found = _found(*ALONE, "batch.global_sequences=6", "batch.microbatch_sequences=1")
    told = found.to_json()
    assert told["step_s"] == found.step_s
    assert told["planned_over_roofline"] == found.planned_s / found.step_s
    assert told["share"] == {name: found.share(name) for name in BINDS}
    kernels = told["kernels"]
    assert isinstance(kernels, list)
    assert [one["seconds"] for one in kernels] == sorted(
        (one.seconds for one in found.kernels), reverse=True
    )
