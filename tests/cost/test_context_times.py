"""What attention waits for: transfers longer than the work that they hide behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.cluster import Link
from echelon.core.plan import Plan
from echelon.cost.context_times import AttentionSeconds, attention_seconds, block_bytes
from echelon.cost.unit_times import attention_flops, flops_rate

FAST = Link(name="fast", degree=2, bandwidth=1e15, latency_s=0.0)


def plan_of(kind: str, *settings: str, length: int = 8192, cp: int = 4) -> Plan:
    sets = (f"mesh.cp={cp}", f"context.kind={kind}", f"batch.sequence_length={length}")
    more = ("model.max_positions=8192", "cluster.preset=8xh100", "model.causal=false")
    return load_job("nano", (*sets, *more, *settings)).plan


def with_links(plan: Plan, *links: Link) -> Plan:
    return replace(plan, cluster=replace(plan.cluster, links=links))


def found(plan: Plan) -> AttentionSeconds:
    seconds = attention_seconds(plan)
    assert seconds is not None
    return seconds


def link(bandwidth: float) -> Link:
    return Link(name="one", degree=8, bandwidth=bandwidth, latency_s=0.0)


def test_a_ring_waits_for_what_its_work_does_not_hide() -> None:
    plan = plan_of("ring")
    work = attention_flops(plan) * 3.5 / flops_rate(plan)
    sent = block_bytes(plan, 0)
    quick = found(with_links(plan, link(1e15)))
    assert quick.work_s == pytest.approx(work)
    # The last gradients go home while the second half of the own block is at work.
    assert quick.exposed_s == 0.0
    slow = found(with_links(plan, link(1.0)))
    assert slow.transfer_s == sent.forward + sent.backward
    # All but the work of each step: three forward, backward all (the last half step too).
    hidden = work / 3.5 * (3 / 4 + 2.5)
    assert slow.transfer_s - slow.exposed_s == pytest.approx(hidden, rel=1e-6)


@pytest.mark.parametrize("kind", ["gathered", "ulysses"])
def test_collectives_have_nothing_to_hide_behind(kind: str) -> None:
    plan = plan_of(kind)
    sent = block_bytes(plan, 0)
    for bandwidth in (1e3, 1e12):
        seconds = found(with_links(plan, link(bandwidth)))
        wanted = (sent.forward + sent.backward) / bandwidth
        assert seconds.exposed_s == seconds.transfer_s == pytest.approx(wanted)


def test_a_gather_takes_as_many_latencies_as_there_are_other_ranks() -> None:
    late = Link(name="late", degree=8, bandwidth=1e30, latency_s=1.0)
    assert found(with_links(plan_of("gathered"), late)).exposed_s == pytest.approx(3 * 3)
    assert found(with_links(plan_of("ulysses"), late)).exposed_s == pytest.approx(4)


def test_heads_are_exchanged_on_the_links_of_neighbours_and_keys_on_those_between() -> None:
    plan = plan_of("ulysses-ring", "context.ulysses_degree=2")
    slow = Link(name="slow", degree=8, bandwidth=1e3, latency_s=0.0)
    both, quick = found(with_links(plan, FAST, slow)), found(with_links(plan, slow))
    assert both.exposed_s < quick.exposed_s
    assert found(with_links(plan, FAST, link(1e15))).exposed_s < 1e-6
    assert attention_seconds(with_links(plan)) is None
    assert attention_seconds(with_links(plan, FAST)) is None
