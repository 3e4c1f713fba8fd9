"""At which rate products run: fp8's where there is a kernel, and never for weight gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Precision
from echelon.cost.seconds.block import BlockSeconds, block_seconds
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.matmul import has_fp8_kernel, product_dtype

FP8 = Precision(parameters="bf16", matmul="fp8")
SETS = ["precision.parameters=bf16", "batch.sequence_length=8192", "batch.global_sequences=8"]


@pytest.mark.parametrize(
    ("devices", "has"),
    [("8xh100", True), ("8xh200", True), ("8xh20", True), ("8xb200", False), ("8xmi300x", False)],
)
def test_hopper_has_a_kernel_of_tiles(devices: str, has: bool) -> None:
    cluster = load_job("llama3-8b", [*SETS, f"cluster.preset={devices}"]).plan.cluster
    assert has_fp8_kernel(cluster, FP8) == has
    assert product_dtype(cluster, FP8) == ("fp8" if has else "bf16")
    assert product_dtype(cluster, replace(FP8, matmul="parameters")) == "bf16"


def test_forward_is_faster_and_weight_gradients_are_not() -> None:
    plain, narrow = (
        block_seconds(
            cost_inputs_from_plan(
                load_job("llama3-8b", [*SETS, "cluster.preset=8xh100", *more]).plan
            ),
            mixture=False,
        )
        for more in ([], ["precision.matmul=fp8"])
    )
    assert narrow.weight_gradients == plain.weight_gradients
    for passed in ("forward", "input_gradients"):
        fast, slow = getattr(narrow, passed), getattr(plain, passed)
        assert fast.matmul < slow.matmul
        assert fast.attention == slow.attention
        # Casts are traffic.
        assert fast.memory_bound > slow.memory_bound


@pytest.mark.parametrize(
    ("devices", "has"),
    [("8xh100", True), ("8xb200", True), ("8xmi300x", False), ("8xa100-80gb", False)],
)
def test_whole_tensors_have_a_kernel_on_more_devices(devices: str, has: bool) -> None:
    cluster = load_job("llama3-8b", [*SETS, f"cluster.preset={devices}"]).plan.cluster
    assert has_fp8_kernel(cluster, replace(FP8, fp8_scales="tensor")) == has


def test_weight_gradients_of_whole_tensors_are_fast_and_e5m2_in_tiles_is_slow() -> None:
    def seconds(*more: str) -> BlockSeconds:
        sets = [*SETS, "cluster.preset=8xh100", "precision.matmul=fp8", *more]
        return block_seconds(cost_inputs_from_plan(load_job("llama3-8b", sets).plan), mixture=False)

    tiles, whole = seconds(), seconds("precision.fp8_scales=tensor")
    assert whole.weight_gradients < tiles.weight_gradients
    assert whole.forward == tiles.forward
    coarse = seconds("precision.fp8_gradients=e5m2")
    assert coarse.input_gradients.matmul > tiles.input_gradients.matmul
    assert coarse.forward == tiles.forward


def test_a_cpu_computes_at_its_own_rate() -> None:
    sets = ["precision.matmul=fp8", "precision.fp8_block=32"]
    plan = load_job("nano", sets).plan
    assert product_dtype(plan.cluster, plan.mathematics.precision) == "fp32"
