"""Seconds of a block on a machine that loses nothing: FLOPs over its peak, shard by shard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.cluster import Link
from echelon.core.plan import Plan
from echelon.cost.bytes.context_sent import block_bytes
from echelon.cost.seconds.block import (
    ExposedSeconds,
    attention_seconds,
    block_seconds,
    context_seconds,
    dispatch_seconds,
    end_seconds,
    routed_matmuls,
)
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.kernels import MOST_FUSED
from tests.cost.seconds.small_work import MACHINE, MIXTURE, MODEL, small_work, with_trainer

ATTENTION = 64 * (64 + 2 * 32) + 64 * 64
"""Weights of the projections."""
MLP = 64 * 2 * 128 + 128 * 64


@pytest.mark.parametrize("tp", [1.0, 2.0])
def test_a_dense_block_does_six_flops_a_weight_and_token(tp: float) -> None:
    found = block_seconds(small_work(tp=tp), mixture=False)
    each = pytest.approx(2 * 128 * (ATTENTION + MLP) / tp / 1e12)
    assert found.forward.matmul == each
    assert found.input_gradients.matmul == each
    assert found.weight_gradients == each
    assert found.forward.expert == found.forward.context == 0.0
    assert (found.forward.tensor > 0.0) == (tp > 1.0)
    assert found.forward.total == pytest.approx(found.forward.compute + found.forward.tensor)


def test_fused_attention_skips_what_the_mask_hides() -> None:
    flops = 4.0 * 128 * 64 * 64
    forward, backward = attention_seconds(small_work())
    assert (forward, backward) == pytest.approx((flops / 5e11, 2.5 * flops / 2.5e11))
    # No kernel is quicker than the best ones that are known.
    quick = replace(MACHINE, attention=1.0)
    most, _ = attention_seconds(small_work(machine=quick))
    assert most == pytest.approx(flops / (MOST_FUSED * 1e12))
    plain, _ = attention_seconds(with_trainer(small_work(), fused_attention=0.0))
    scores = 16.0 * 128 * 128 * 8 / 1e14
    assert plain == pytest.approx(2 * flops / 5e11 + scores)


def test_a_mixture_has_its_experts_one_by_one_a_router_and_shared_experts() -> None:
    work = small_work(model=MIXTURE)
    expert = 3 * 64 * 32
    routed = pytest.approx(2 * 128 * 2 * expert / 1e12)
    assert routed_matmuls(work) == (routed, routed, routed)
    found = block_seconds(work, mixture=True)
    every = ATTENTION + 64 * 8 + expert + 2 * expert
    assert found.forward.matmul == pytest.approx(2 * 128 * every / 1e12)
    # Over expert ranks there are fewer experts, each with the rows of all.
    apart, _, _ = routed_matmuls(small_work(model=MIXTURE, ep=4.0))
    assert apart == routed


def test_a_pass_takes_no_less_than_its_kernels_take_to_start() -> None:
    started = with_trainer(small_work(), host_s=1.0, kernels=3.0)
    found = block_seconds(started, mixture=False)
    assert found.forward.total == pytest.approx(3.0)
    # Where the host is the device, starting kernels adds to what they take.
    host = block_seconds(with_trainer(started, host_adds=1.0), mixture=False)
    assert host.forward.host == 3.0
    assert host.input_gradients.host == 4.5


def test_the_head_is_one_product_forward_and_two_backward() -> None:
    ends = end_seconds(with_trainer(small_work(tp=2.0), logit_bytes=0.0))
    product = 2 * 128 * 64 * 256 / 2 / 1e12
    alone = end_seconds(with_trainer(small_work(), logit_bytes=0.0))
    assert alone.head_forward == pytest.approx(2 * product)
    assert alone.head_backward == pytest.approx(4 * product)
    # Tensor ranks add up small numbers forward, the gradient of the stream backward.
    assert ends.head_forward > product
    assert ends.head_backward > 2 * product
    assert alone.embedding == pytest.approx(7 * 2 * 128 * 64 / 1e14)
    assert MODEL.tied == 0.0


def test_where_the_loss_is_computed_in_backward_its_seconds_go_there() -> None:
    usual = end_seconds(small_work(tp=2.0))
    late = end_seconds(with_trainer(small_work(tp=2.0), loss_backward=1.0))
    assert late.head_forward == 0.0
    assert late.head_weight_gradient == usual.head_weight_gradient
    moved = late.head_input_gradient - usual.head_input_gradient
    assert moved == pytest.approx(usual.head_forward)


FAST = Link(name="fast", degree=2, bandwidth=1e15, latency_s=0.0, efficiency=1.0, half_bytes=0.0)


def context_plan(kind: str, *settings: str, length: int = 8192, cp: int = 4) -> Plan:
    sets = (f"mesh.cp={cp}", f"context.kind={kind}", f"batch.sequence_length={length}")
    more = ("model.max_positions=8192", "cluster.preset=8xh100", "model.causal=false")
    return load_job("nano", (*sets, *more, *settings)).plan


def expert_plan(*settings: str, cluster: str = "16xh100") -> Plan:
    sets = (
        f"cluster.preset={cluster}",
        "precision.parameters=bf16",
        "zero.stage=1",
        "mesh.dp_shard=16",
    )
    return load_job("mixtral-8x7b", (*sets, *settings)).plan


def with_links(plan: Plan, *links: Link) -> Plan:
    return replace(plan, cluster=replace(plan.cluster, links=links))


def attention_of(plan: Plan) -> ExposedSeconds:
    seconds = context_seconds(plan)
    assert seconds is not None
    return seconds


def dispatch_of(plan: Plan) -> ExposedSeconds:
    seconds = dispatch_seconds(plan)
    assert seconds is not None
    return seconds


def link(bandwidth: float, latency_s: float = 0.0) -> Link:
    return replace(FAST, name="one", degree=8, bandwidth=bandwidth, latency_s=latency_s)


def test_a_ring_waits_for_what_its_work_does_not_hide() -> None:
    plan = context_plan("ring")
    quick = attention_of(with_links(plan, link(1e15)))
    # What is hidden slows the work beside it by a share of its own time.
    slowed = float(cost_inputs_from_plan(plan).software.interference) * quick.transfer_s
    assert quick.exposed_s == pytest.approx(slowed)
    assert quick.total_s == pytest.approx(quick.compute_s, rel=1e-4)
    slow = attention_of(with_links(plan, link(1.0)))
    assert slow.compute_s == quick.compute_s
    # Of four steps one has its keys: the work of three hides something of the transfers.
    hidden = (1.0 - float(cost_inputs_from_plan(plan).software.interference)) * quick.compute_s
    assert slow.transfer_s - slow.exposed_s == pytest.approx(0.75 * hidden, rel=1e-3)
    # Forward the keys of three others travel, backward they and their gradients.
    assert slow.transfer_s == pytest.approx(block_bytes(plan, 0)[0] * 3, rel=0.01)


@pytest.mark.parametrize("kind", ["gathered", "ulysses"])
def test_collectives_have_nothing_to_hide_behind(kind: str) -> None:
    for bandwidth in (1e6, 1e12):
        seconds = attention_of(with_links(context_plan(kind), link(bandwidth)))
        assert seconds.exposed_s == seconds.transfer_s > 0.0
    slow, quick = (attention_of(with_links(context_plan(kind), link(b))) for b in (1e6, 2e6))
    assert slow.transfer_s == pytest.approx(2.0 * quick.transfer_s)


def test_a_gather_takes_as_many_latencies_as_there_are_other_ranks() -> None:
    late = link(1e30, latency_s=1.0)
    # Once forward, twice backward: keys again, and their gradients.
    assert attention_of(with_links(context_plan("gathered"), late)).exposed_s == pytest.approx(9)


def test_heads_are_exchanged_on_the_links_of_neighbours_and_keys_on_those_between() -> None:
    plan = context_plan("ulysses-ring", "context.ulysses_degree=2")
    both = attention_of(with_links(plan, FAST, link(1e6)))
    quick = attention_of(with_links(plan, link(1e6)))
    assert both.exposed_s < quick.exposed_s
    assert attention_of(with_links(plan, FAST, link(1e15))).exposed_s < 1e-6
    assert context_seconds(with_links(plan)) is None
    assert context_seconds(with_links(plan, FAST)) is None


def test_rows_that_travel_nowhere_take_no_time() -> None:
    assert dispatch_seconds(expert_plan()) is None
    assert dispatch_seconds(with_links(expert_plan("mesh.ep=8"))) is None
    assert dispatch_seconds(load_job("nano").plan) is None


def test_shown_is_what_the_trainer_does_not_hide() -> None:
    plan = expert_plan("mesh.ep=8")
    found = dispatch_of(plan)
    hidden = float(cost_inputs_from_plan(plan).software.expert_overlap)
    assert found.exposed_s == pytest.approx((1.0 - hidden) * found.transfer_s)


def test_two_hops_cross_less_between_nodes() -> None:
    sets = ("mesh.ep=16", "model.experts.num_experts=64", "model.experts.top_k=8")
    flat, hops = (
        dispatch_of(expert_plan(*sets, f"experts.dispatch={kind}")) for kind in ("flat", "two-hop")
    )
    assert hops.transfer_s < flat.transfer_s


def test_chunks_start_again_and_hide_each_other() -> None:
    whole, parts = (
        dispatch_of(expert_plan("mesh.ep=8", f"experts.chunks={count}")) for count in (1, 4)
    )
    assert parts.transfer_s > whole.transfer_s
    assert parts.exposed_s < whole.exposed_s


def test_padding_travels_too() -> None:
    sets = ("mesh.ep=8", "experts.capacity_factor=2.0")
    plain, padded = (
        dispatch_of(expert_plan(*sets, f"experts.padded={word}")) for word in ("false", "true")
    )
    assert plain.transfer_s < padded.transfer_s < 2.0 * plain.transfer_s
