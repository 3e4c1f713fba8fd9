"""Steps that were measured on one GPU are predicted; what was measured has a source and a band."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.loads import LOADS, Case, Settings, known_device
from bench.gpu.subjects import gpu_plan
from echelon.config.cluster.settings import named_cluster
from echelon.config.load import load_job
from echelon.core.cluster import NOT_MEASURED, Cluster
from echelon.core.plan import Plan
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.kernels import IN_COMPANY, measured_attention_kernel, measured_tables
from echelon.cost.seconds.step import step_seconds
from echelon.cost.seconds.trainers import our_constants

STEPS: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "measured_steps.toml").read_text(encoding="utf-8")
)
NEAR = 0.12
"""How far off the seconds of a measured step may be."""


def plan_of(case: dict[str, Any]) -> Plan:
    """Return the plan of a case of bench/gpu, with the kernel of attention that ran."""
    settings = Settings(
        load=case["model"],
        sequences=case["sequences"],
        case=Case(
            framework="echelon",
            zero_stage=case["zero"],
            optimizer_home=case.get("optimizer_home", "none"),
        ),
    )
    plan = gpu_plan(settings, known_device(STEPS["device"]))
    context = replace(plan.layout.context, attention=STEPS["attention"])
    kernels = replace(plan.layout.kernels, fused=tuple(STEPS["pieces"]))
    return replace(plan, layout=replace(plan.layout, context=context, kernels=kernels))


def work_of(case: dict[str, Any]) -> CostInputs:
    """Return what the formulas read of a case, with the norm of gradients that ran."""
    work = cost_inputs_from_plan(plan_of(case))
    return replace(work, software=replace(work.software, norm_traffic=STEPS["norm_traffic"]))


@pytest.mark.parametrize("case", STEPS["step"], ids=lambda case: case["name"])
def test_a_measured_step_is_predicted(case: dict[str, Any]) -> None:
    found = step_seconds(work_of(case))
    assert float(found.total) == pytest.approx(case["step_s"], rel=NEAR)


@pytest.mark.parametrize("case", STEPS["step"], ids=lambda case: case["name"])
def test_so_are_the_kernels_of_its_profile(case: dict[str, Any]) -> None:
    """Attention's two, and those of the update, which a profile tells apart."""
    work = work_of(case)
    terms, pace = step_seconds(work).terms, float(work.software.pace)
    attention = float(terms["attention"]) / pace
    # Beside its main kernels, attention has small ones that no page lists.
    assert case["attention_s"] < attention < 1.15 * case["attention_s"]
    if "update_s" in case:
        assert float(terms["optimizer"]) / pace == pytest.approx(case["update_s"], rel=NEAR)


def test_what_travels_to_the_host_and_back_goes_both_ways_at_once() -> None:
    rests, travels = (
        next(case for case in STEPS["step"] if case["name"] == name)
        for name in ("1b, ZeRO-3", "1b, ZeRO-3, optimizer in host memory")
    )
    more = float(step_seconds(work_of(travels)).total) - float(step_seconds(work_of(rests)).total)
    assert more == pytest.approx(travels["to_device_s"], rel=0.02)
    assert travels["to_device_s"] > travels["to_host_s"]
    assert more == pytest.approx(travels["step_s"] - rests["step_s"], rel=0.02)


@pytest.mark.parametrize("name", measured_tables())
def test_a_measurement_has_a_source_and_a_band(name: str) -> None:
    table = measured_tables()[name]
    assert "bench/gpu/run.sh" in table.source
    bands = [*table.rates.values()]
    bands += [rate for one in table.attention for rate in (one.forward, one.backward)]
    assert all(one.low <= one.value <= one.high for one in bands)


def cluster(name: str) -> Cluster:
    found = named_cluster(name, "a test")
    assert isinstance(found, Cluster)
    return found


@pytest.mark.parametrize("name", ["h100", "h200", "gh200", "h800"])
def test_hopper_is_measured_and_others_are_not(name: str) -> None:
    assert cluster(f"1x{name}").device.measured == "hopper"
    assert cluster("1xa100-80gb").device.measured == NOT_MEASURED


def on(name: str, *settings: str) -> Plan:
    sets = (f"cluster.preset={name}", "precision.parameters=bf16", *settings)
    return load_job("llama3-8b", list(sets)).plan


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        ((), "cudnn"),
        (("model.causal=false",), "cudnn"),
        (("model.window=512",), "flash"),
        (("model.window=8192",), "cudnn"),
        (("batch.documents=separate",), "flash"),
        (("context.attention=flash",), "flash"),
        (("context.attention=cudnn",), "cudnn"),
        (("context.attention=plain",), "plain"),
    ],
)
def test_the_kernel_of_attention_is_that_of_the_plan(
    settings: tuple[str, ...], kernel: str
) -> None:
    assert measured_attention_kernel(on("1xh200", *settings)) == kernel


def test_rates_are_those_of_a_kernel_and_a_width_of_heads() -> None:
    table = measured_tables()["hopper"]
    narrow, wide = (table.of_attention("cudnn", width) for width in (64, 128))
    assert narrow.forward.value < wide.forward.value
    assert table.of_attention("cudnn", 80) == narrow
    assert table.of_attention("flash", 256) == table.of_attention("flash", 128)
    machine = cost_inputs_from_plan(on("1xh200")).machine
    assert (machine.attention, machine.attention_backward) == (
        wide.forward.value,
        wide.backward.value,
    )


def test_devices_are_slower_beside_others() -> None:
    alone, beside = (
        cost_inputs_from_plan(on(f"{n}xh200", f"mesh.dp_replicate={n}")) for n in (1, 8)
    )
    for name in ("matmul", "memory", "optimizer", "attention", "attention_backward"):
        one, many = (float(getattr(work.machine, name)) for work in (alone, beside))
        assert many == pytest.approx(IN_COMPANY * one), name


def test_no_more_of_a_memory_is_reached_than_a_preset_says() -> None:
    """Pieces between products do not get faster with the memory of a device alone."""
    h100, h200 = (cost_inputs_from_plan(on(f"1x{name}")).machine for name in ("h100", "h200"))
    rates = [float(one.memory * one.memory_bandwidth) for one in (h100, h200)]
    assert rates[0] < rates[1] == pytest.approx(2.98e12)
    assert float(h100.memory) == cluster("1xh100").device.efficiency.memory


def test_products_in_eight_bits_are_predicted_as_before() -> None:
    plan = on("1xh200", "precision.matmul=fp8")
    machine, efficiency = cost_inputs_from_plan(plan).machine, plan.cluster.device.efficiency
    peak = plan.cluster.device.flops("fp8")
    assert peak is not None
    assert machine.peak_flops * machine.matmul == pytest.approx(peak * efficiency.matmul)


def test_another_trainers_constants_are_with_those_of_its_fit() -> None:
    plan = on("1xh200")
    other = replace(our_constants(plan.cluster, plan.layout.kernels), gpu_kernels=0.0)
    machine, efficiency = cost_inputs_from_plan(plan, other).machine, plan.cluster.device.efficiency
    assert (machine.matmul, machine.attention) == (efficiency.matmul, efficiency.attention)


def test_every_model_that_was_measured_is_one_of_the_bench() -> None:
    assert {case["model"] for case in STEPS["step"]} <= set(LOADS)
