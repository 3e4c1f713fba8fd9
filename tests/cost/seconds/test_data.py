"""Gradients, gathers and updates over data ranks by hand; offload over the link of a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.inputs.cost_inputs import data_group_links
from echelon.cost.seconds.collectives import all_reduce_seconds
from echelon.cost.seconds.data import (
    REACHED,
    SUM_SHARE,
    HeldWeights,
    accumulation_seconds,
    offload_seconds,
    outer_seconds,
    step_collective_seconds,
    unit_gather_seconds,
    update_bytes,
    update_seconds,
)
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.step import fullest_rank_weights, step_seconds
from echelon.planner.search.ranked import cost_inputs_from_candidate, estimate_candidate
from echelon.planner.search.search import search
from tests.cost.seconds.small_work import small_work, with_trainer
from tests.planner.requests import small


def test_state_that_rests_on_the_host_travels_every_step() -> None:
    request = small(pins=["zero=1", "pp=1"])
    best = search(replace(request, top=1)).best
    assert best is not None
    choice = replace(best.candidate, offload=True)
    work = cost_inputs_from_candidate(request, choice)
    slower = estimate_candidate(request, choice).seconds["optimizer"]
    slower -= estimate_candidate(request, best.candidate).seconds["optimizer"]
    held = estimate_candidate(request, best.candidate).bytes["optimizer"]
    assert work.machine.host_bandwidth == request.cluster.device.host_bandwidth
    travels = held / (REACHED * request.cluster.device.host_bandwidth)
    assert slower == pytest.approx(travels, rel=0.02)
    assert float(offload_seconds(work, 1e9)) == pytest.approx(
        12e9 / (REACHED * request.cluster.device.host_bandwidth)
    )
    assert float(offload_seconds(cost_inputs_from_candidate(request, best.candidate), 1e9)) == 0.0
    on_host = replace(work, software=replace(work.software, host_adds=1.0))
    assert float(offload_seconds(on_host, 1e9)) == 0.0


HELD = HeldWeights(blocks=8e6, routed=0.0, ends=2e6)


def test_stages_one_and_two_send_what_stage_zero_sends() -> None:
    plain = with_trainer(small_work(dp_shard=4.0), reduce_share=1.0)
    cut = with_trainer(small_work(dp_shard=4.0, zero=1.0), reduce_share=1.0)
    (reduce, none), (scatter, gather) = (step_collective_seconds(w, HELD) for w in (plain, cut))
    assert (reduce, none) == (pytest.approx(6e-5 + 1.5 * 4e7 / 1e9), 0.0)
    # Gradients of four bytes are scattered, parameters of two are gathered.
    assert (scatter, gather) == pytest.approx((3e-5 + 0.75 * 4e7 / 1e9, 3e-5 + 0.75 * 2e7 / 1e9))


def test_replicas_add_up_slices() -> None:
    work = with_trainer(small_work(dp_shard=4.0, dp_replicate=2.0, zero=1.0), reduce_share=1.0)
    scatter, _ = step_collective_seconds(work, HELD)
    across = all_reduce_seconds(data_group_links(work).replicate, 4e7 / 4)
    assert scatter == pytest.approx(3e-5 + 0.75 * 4e7 / 1e9 + across)


def test_experts_are_cut_over_the_ranks_that_hold_the_same_ones() -> None:
    ways = data_group_links(small_work(tp=2.0, dp_shard=8.0, ep=4.0, expert_tp=2.0))
    assert (ways.shared.degree, ways.routed.degree, ways.replicate.degree) == (8.0, 2.0, 1.0)
    gather, scatter = unit_gather_seconds(small_work(dp_shard=4.0, ep=4.0, zero=3.0), 1e6, 1e6)
    # Four ranks share out the experts: nobody else has the same ones.
    assert (gather, scatter) == pytest.approx((3e-5 + 0.75 * 2e6 / 1e9, 3e-5 + 0.75 * 4e6 / 1e9))


def test_an_update_moves_the_states_of_a_slice() -> None:
    assert update_seconds(small_work(dp_shard=4.0), HELD) == pytest.approx(40.0 * 1e7 / 5e13)
    cut = small_work(dp_shard=4.0, zero=1.0)
    assert update_seconds(cut, HELD) == pytest.approx(40.0 * 1e7 / 4 / 5e13)
    adding = with_trainer(cut, adding_bytes=8.0)
    assert accumulation_seconds(adding, HELD) == pytest.approx(8.0 * 1e7 / 1e14)
    assert accumulation_seconds(cut, HELD) == 0.0


def test_an_update_moves_the_bytes_of_its_kernels() -> None:
    """By one kernel each state, gradient and parameter once; casts by themselves come on top."""
    one = with_trainer(small_work(), optimizer_bytes=0.0)
    apart = with_trainer(small_work(), optimizer_bytes=0.0, casts_apart=1.0)
    assert float(update_bytes(one)) == 28.0 + 2.0 / SUM_SHARE
    assert float(update_bytes(apart)) == float(update_bytes(one)) + 6.0 / SUM_SHARE + 6.0
    assert float(update_bytes(small_work())) == 40.0


BASE = (
    "cluster.preset=16xh100",
    "mesh.dp_replicate=2",
    "mesh.dp_shard=8",
    "zero.stage=3",
    "batch.global_sequences=64",
    "optimizer.warmup_steps=0",
)


def plan_of(*sets: str) -> Plan:
    return load_job("llama3-8b-zero3", (*BASE, *sets)).plan


def outer(plan: Plan) -> float:
    return float(step_seconds(cost_inputs_from_plan(plan)).terms["outer"])


def test_a_mean_step_waits_for_one_in_h_of_a_round() -> None:
    """Evidence of row B06: seconds over dp_replicate are 1/H."""
    once, seldom = (plan_of(f"local_sgd.every={n}", "train.steps=1000") for n in (1, 50))
    assert outer(once) == pytest.approx(50 * outer(seldom), rel=1e-12)
    assert outer(once) > 0


def test_islands_sum_nothing_in_a_step() -> None:
    apart = step_seconds(cost_inputs_from_plan(plan_of("local_sgd.every=50", "train.steps=1000")))
    together = step_seconds(cost_inputs_from_plan(plan_of("train.steps=1000")))
    assert "outer" not in together.terms
    assert float(apart.terms["gradients"]) < float(together.terms["gradients"])
    assert float(apart.total) < float(together.total)


def test_what_is_late_travels_behind_steps() -> None:
    work = cost_inputs_from_plan(plan_of("local_sgd.every=50", "train.steps=1000"))
    held = fullest_rank_weights(work, work.model.layers, 0.0)
    shown = float(outer_seconds(work, held, 10.0))
    late = replace(work, layout=replace(work.layout, delay=1.0))
    hidden, rest = (float(outer_seconds(late, held, step_s)) for step_s in (10.0, 0.0))
    assert rest == pytest.approx(shown)
    assert 0 < hidden < shown
