"""Times of units by formula: they add up to the FLOPs of a step, and follow what shares them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.flops import attention_width, model_flops_per_token
from echelon.cost.unit_times import (
    NOMINAL_FLOPS_PER_BYTE,
    UnitTimes,
    attention_flops,
    flops_rate,
    modelled_times,
    stage_durations,
    transfer_seconds,
    unit_names,
    with_recompute,
)


def plan_of(*settings: str, run: str = "nano") -> Plan:
    return load_job(run, settings).plan


def products(plan: Plan) -> float:
    """Return the FLOPs of all matrix products of a microbatch, as `flops.py` counts them."""
    model, length = plan.model, plan.mathematics.sequence_length
    tokens = plan.layout.microbatch_sequences * length
    attention = 12.0 * model.layers * attention_width(model) * length
    return tokens * (model_flops_per_token(model, length) - attention)


@pytest.mark.parametrize("run", ["nano", "gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_products_of_all_units_are_those_of_the_model(run: str) -> None:
    plan = plan_of("cluster.preset=8xh100", "precision.parameters=bf16", run=run)
    times, model = modelled_times(plan), plan.model
    found = 3 * sum(
        seconds for unit, seconds in times.weight_gradient_s.items() if unit != "embedding"
    )
    # Norms, biases and routers' biases are counted there as weights that tokens meet, not here.
    assert found * flops_rate(plan) == pytest.approx(products(plan), rel=4e-3)
    length = plan.mathematics.sequence_length
    tokens = plan.layout.microbatch_sequences * length
    attention = 2.0 * tokens * length * attention_width(model) / flops_rate(plan)
    block = f"layers.{model.layers - 1}"
    forward, product = times.forward_s[block], times.weight_gradient_s[block]
    assert forward - product == pytest.approx(attention, rel=1e-6)
    assert times.input_gradient_s[block] - product == pytest.approx(2.5 * attention, rel=1e-6)
    assert set(times.forward_s) == set(unit_names(model.layers))


def test_under_sequence_parallelism_tensor_ranks_share_what_leads_down_to_latent_vectors() -> None:
    settings = ("mesh.tp=4", "cluster.preset=8xh100", "precision.parameters=bf16")
    plans = [
        plan_of(*settings, f"mesh.sequence_parallel={on}", run="deepseek-v3")
        for on in ("false", "true")
    ]
    whole, shared = (modelled_times(plan).forward_s["layers.0"] for plan in plans)
    weights = 7168 * (1536 + 512 + 64)
    less = 2.0 * plans[0].local_tokens * weights * (1 - 1 / 4)
    assert (whole - shared) * flops_rate(plans[0]) == pytest.approx(less, rel=1e-6)


def test_tensor_ranks_share_a_unit() -> None:
    one, two = (modelled_times(plan_of(f"mesh.tp={tp}", "model.vocab=300")) for tp in (1, 2))
    for unit in ("layers.0", "head"):
        assert two.forward_s[unit] == pytest.approx(one.forward_s[unit] / 2)
        assert two.total_s(unit) == pytest.approx(one.total_s(unit) / 2)
    assert two.forward_s["embedding"] == one.forward_s["embedding"]


def test_a_device_of_unknown_peak_has_a_nominal_one() -> None:
    cpu, gpu = plan_of(), plan_of("cluster.preset=8xh100", "precision.parameters=bf16")
    assert flops_rate(cpu) == NOMINAL_FLOPS_PER_BYTE * cpu.cluster.device.memory_bandwidth
    assert flops_rate(gpu) == gpu.cluster.device.flops("bf16")


def test_recomputed_blocks_run_forward_in_b_too() -> None:
    plain = modelled_times(plan_of())
    again = modelled_times(plan_of("recompute.policy=full", "recompute.every=2"))
    for layer in range(4):
        unit = f"layers.{layer}"
        extra = again.input_gradient_s[unit] - plain.input_gradient_s[unit]
        assert extra == pytest.approx(plain.forward_s[unit] if layer % 2 == 0 else 0.0)
    assert again.weight_gradient_s == plain.weight_gradient_s
    measured = replace(plain, backward_s=plain.whole_backward_s)
    found = with_recompute(plan_of("recompute.policy=full"), measured)
    assert found.backward_s == pytest.approx(found.whole_backward_s)
    assert found.whole_backward_s["layers.1"] == pytest.approx(plain.total_s("layers.1"))


def test_stages_last_as_long_as_their_units() -> None:
    plan = plan_of("mesh.pp=2", "pipeline.stages=[[], [0, 1, 2, 3]]")
    times = modelled_times(plan)
    durations = stage_durations(plan, times)
    assert durations.forward_s[0] == times.forward_s["embedding"]
    assert durations.forward_s[1] == pytest.approx(
        4 * times.forward_s["layers.0"] + times.forward_s["head"]
    )
    for stage in range(2):
        halves = durations.input_gradient_s[stage] + durations.weight_gradient_s[stage]
        assert durations.backward_s[stage] == pytest.approx(halves)
    assert durations.transfer_s == (times.transfer_s,)
    assert durations.message_bytes == 2 * 128 * 128 * 4


def test_a_fused_backward_may_be_faster_than_its_halves() -> None:
    third = dict.fromkeys(unit_names(1), 1.0)
    times = UnitTimes(
        source="measured",
        forward_s=third,
        input_gradient_s=third,
        weight_gradient_s=third,
        backward_s=dict.fromkeys(unit_names(1), 1.5),
    )
    plan = plan_of("model.layers=1")
    durations = stage_durations(plan, times)
    assert durations.backward_s == (4.5,)
    assert durations.input_gradient_s == durations.weight_gradient_s == (3.0,)


def test_messages_go_over_the_slowest_link_between_neighbours() -> None:
    sets = ("cluster.preset=16xh100", "mesh.tp=2", "mesh.dp_replicate=2")
    within = plan_of(*sets, "mesh.pp=2")
    across = plan_of(*sets, "mesh.pp=4", "model.layers=8")
    fast, slow = within.cluster.links
    assert transfer_seconds(within, 10**6) == fast.latency_s + 10**6 / fast.bandwidth
    assert transfer_seconds(across, 10**6) == slow.latency_s + 10**6 / slow.bandwidth
    half = plan_of(*sets, "mesh.pp=2", "mesh.sequence_parallel=true")
    assert modelled_times(half).message_bytes * 2 == modelled_times(within).message_bytes
    assert modelled_times(plan_of()).transfer_s == 0.0


def test_attention_costs_what_the_mask_lets_meet() -> None:
    length, width = 128, attention_width(plan_of().model)
    tokens = 2 * length
    assert attention_flops(plan_of()) == 2.0 * tokens * length * width
    assert attention_flops(plan_of("model.causal=false")) == 4.0 * tokens * length * width
    assert attention_flops(plan_of("model.window=200")) == attention_flops(plan_of())
    # Query i meets min(i + 1, 16) keys, its own one counted half.
    near = sum(min(i + 1, 16) - 0.5 for i in range(length))
    assert attention_flops(plan_of("model.window=16")) == 4.0 * 2 * near * width


def test_context_ranks_share_a_unit_and_send_shorter_messages() -> None:
    one, four = plan_of("mesh.pp=2"), plan_of("mesh.pp=2", "mesh.cp=4")
    alone, shared = modelled_times(one), modelled_times(four)
    for unit in unit_names(one.model.layers):
        assert shared.total_s(unit) == pytest.approx(alone.total_s(unit) / 4)
    assert shared.message_bytes * 4 == alone.message_bytes
