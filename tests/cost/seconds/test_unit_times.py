"""Times of units: those of the blocks and ends that a step has, cut and repeated as plans say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan, Recompute, RecomputedOperator, RecomputePolicy
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.stages import COMPUTED
from echelon.cost.seconds.step import block_kind_seconds, step_seconds
from echelon.cost.seconds.unit_times import (
    UnitTimes,
    stage_durations,
    unit_times_from_formulas,
    with_recompute,
    with_transfer,
)


def plan_of(*settings: str, run: str = "nano") -> Plan:
    return load_job(run, settings).plan


def on_gpus(*settings: str, run: str = "nano") -> Plan:
    return plan_of("cluster.preset=8xh100", "precision.parameters=bf16", *settings, run=run)


def again(plan: Plan, policy: RecomputePolicy) -> Plan:
    """Return a plan with another policy of recompute; of operators it is attention's."""
    operators: tuple[RecomputedOperator, ...] = ("attention",) if policy == "selective" else ()
    recompute = Recompute(policy=policy, operators=operators)
    return replace(plan, layout=replace(plan.layout, recompute=recompute))


@pytest.mark.parametrize("run", ["nano", "gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_units_add_up_to_what_a_step_computes(run: str, policy: RecomputePolicy) -> None:
    plan = again(on_gpus(run=run), policy)
    times = unit_times_from_formulas(plan)
    blocks = {f"layers.{layer}" for layer in range(plan.model.layers)}
    assert set(times.forward_s) == {"embedding", *blocks, "head"}
    found = plan.num_microbatches * sum(map(times.total_s, times.forward_s))
    terms = step_seconds(cost_inputs_from_plan(plan)).terms
    assert found == pytest.approx(sum(float(terms[name]) for name in COMPUTED), rel=1e-9)


def test_tensor_ranks_share_a_unit() -> None:
    one, two = (
        unit_times_from_formulas(on_gpus(f"mesh.tp={tp}", run="llama3-8b")) for tp in (1, 2)
    )
    for unit in ("layers.0", "head"):
        # Narrower products reach less of the peak, and ranks exchange what they have.
        assert one.total_s(unit) / 2 < two.total_s(unit) < one.total_s(unit)


def test_the_head_runs_in_backward_alone() -> None:
    times = unit_times_from_formulas(on_gpus(run="llama3-8b"))
    assert times.forward_s["head"] == 0.0
    # Logits and the gradient of the input; the weight's is one product.
    assert times.input_gradient_s["head"] > 2 * times.weight_gradient_s["head"] > 0.0


def test_recomputed_blocks_run_forward_in_b_too() -> None:
    plain = unit_times_from_formulas(plan_of())
    twice = unit_times_from_formulas(plan_of("recompute.policy=full", "recompute.every=2"))
    for layer in range(4):
        unit = f"layers.{layer}"
        extra = twice.input_gradient_s[unit] - plain.input_gradient_s[unit]
        assert extra == pytest.approx(plain.forward_s[unit] if layer % 2 == 0 else 0.0)
    assert twice.weight_gradient_s == plain.weight_gradient_s
    measured = replace(plain, backward_s=plain.whole_backward_s)
    found = with_recompute(plan_of("recompute.policy=full"), measured)
    assert found.backward_s == pytest.approx(found.whole_backward_s)
    assert found.whole_backward_s["layers.1"] == pytest.approx(plain.total_s("layers.1"))


def test_selective_recompute_is_attention_once_more() -> None:
    plan = on_gpus(run="llama3-8b")
    plain, some, every = (
        unit_times_from_formulas(again(plan, policy)) for policy in ("none", "selective", "full")
    )
    unit = "layers.3"
    assert plain.total_s(unit) < some.total_s(unit) < every.total_s(unit)
    assert plain.forward_s == some.forward_s


def test_operators_cost_what_they_do_again() -> None:
    plain = unit_times_from_formulas(on_gpus(run="llama3-8b"))

    def share(*operators: str) -> float:
        sets = ["recompute.policy=selective", f"recompute.operators={list(operators)}"]
        times = unit_times_from_formulas(on_gpus(*sets, run="llama3-8b"))
        assert times.forward_s == plain.forward_s
        more = times.input_gradient_s["layers.3"] - plain.input_gradient_s["layers.3"]
        return more / plain.forward_s["layers.3"]

    norm, activation, mlp = share("norm"), share("activation"), share("mlp")
    assert 0.0 < norm < activation < 0.05
    # Gate and up are these of the weights of a block, and larger products are faster.
    weights = 2 * 14336 / (2 * 4096 + 2 * 1024 + 3 * 14336)
    forward = block_kind_seconds(cost_inputs_from_plan(on_gpus(run="llama3-8b"))).dense.forward
    products = float(np.max(forward.matmul / forward.total))
    assert mlp - activation == pytest.approx(weights * products, rel=0.1)
    assert share("norm", "mlp") == pytest.approx(norm + mlp)


def test_stages_last_as_long_as_their_units() -> None:
    plan = plan_of("mesh.pp=2", "pipeline.stages=[[], [0, 1, 2, 3]]")
    times = unit_times_from_formulas(plan)
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
    units: list[str] = ["embedding", "layers.0", "head"]
    third = dict.fromkeys(units, 1.0)
    times = UnitTimes(
        source="measured",
        forward_s=third,
        input_gradient_s=third,
        weight_gradient_s=third,
        backward_s=dict.fromkeys(units, 1.5),
    )
    plan = plan_of("model.layers=1")
    durations = stage_durations(plan, times)
    assert durations.backward_s == (4.5,)
    assert durations.input_gradient_s == durations.weight_gradient_s == (3.0,)


def test_messages_go_over_the_slowest_link_between_neighbours() -> None:
    sets = ("cluster.preset=16xh100", "mesh.tp=2", "mesh.dp_replicate=2")
    within = plan_of(*sets, "mesh.pp=2")
    across = plan_of(*sets, "mesh.pp=4", "model.layers=8")
    for plan, link in zip((within, across), within.cluster.links, strict=True):
        times = unit_times_from_formulas(plan)
        reached = link.bandwidth * link.efficiency
        wanted = link.latency_s + (times.message_bytes + link.half_bytes) / reached
        assert times.transfer_s == pytest.approx(wanted)
    half = plan_of(*sets, "mesh.pp=2", "mesh.sequence_parallel=true")
    assert (
        unit_times_from_formulas(half).message_bytes * 2
        == unit_times_from_formulas(within).message_bytes
    )
    assert unit_times_from_formulas(plan_of()).transfer_s == 0.0
    assert with_transfer(across, unit_times_from_formulas(within)) == replace(
        unit_times_from_formulas(within), transfer_s=unit_times_from_formulas(across).transfer_s
    )


def test_attention_costs_what_the_mask_lets_meet() -> None:
    def attention_s(*more: str) -> float:
        # What selective recompute computes once more is attention.
        plan = on_gpus("context.attention=flash", *more, run="llama3-8b")
        plain, more_s = (
            unit_times_from_formulas(again(plan, one)) for one in ("none", "selective")
        )
        return more_s.total_s("layers.0") - plain.total_s("layers.0")

    causal, length = attention_s(), 8192
    assert on_gpus(run="llama3-8b").mathematics.sequence_length == length
    # Kernels that meet fewer keys reach less of their rate.
    half = on_gpus(run="llama3-8b").cluster.device.efficiency.half_reach

    def wanted(pairs: float) -> float:
        keys, usual = pairs / length, length / 2
        return causal * (keys / usual) * (1.0 + half / keys) / (1.0 + half / usual)

    assert half > 0.0
    assert attention_s("model.causal=false") == pytest.approx(wanted(length**2))
    assert attention_s(f"model.window={length + 1}") == pytest.approx(causal)
    near = sum(min(i + 1, 512) - 0.5 for i in range(length))
    assert attention_s("model.window=512") == pytest.approx(wanted(near))


def test_context_ranks_share_a_unit_and_send_shorter_messages() -> None:
    alone, shared = (
        unit_times_from_formulas(on_gpus("mesh.pp=2", f"mesh.cp={cp}", run="llama3-8b"))
        for cp in (1, 4)
    )
    for unit in alone.forward_s:
        assert alone.total_s(unit) / 5 < shared.total_s(unit) < alone.total_s(unit) / 2
    assert shared.message_bytes * 4 == alone.message_bytes


def test_padded_rows_are_multiplied_too() -> None:
    sets = ("mesh.dp_shard=2", "mesh.ep=2", "experts.capacity_factor=2.0")
    plain, padded = (
        cost_inputs_from_plan(
            on_gpus(*sets, f"experts.padded={word}", run="mixtral-8x7b")
        ).layout.padding
        for word in ("false", "true")
    )
    assert (plain, padded) == (1.0, 2.0)
