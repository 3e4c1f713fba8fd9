"""What is exposed of transfers: keys, heads and rows that take longer than the work beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.cluster import Link
from echelon.core.plan import Plan
from echelon.cost.bytes.context_sent import block_bytes
from echelon.cost.seconds.exposed import (
    ExposedSeconds,
    context_seconds,
    dispatch_seconds,
)
from echelon.cost.seconds.from_plan import cost_inputs_from_plan

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
