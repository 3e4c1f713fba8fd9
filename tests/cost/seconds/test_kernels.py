"""Seconds of one kernel: its FLOPs or its bytes, whichever take longer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.config.load import load_job
from echelon.core.plan import Precision
from echelon.cost.seconds.block import BlockSeconds, attention_seconds, block_seconds
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.kernels import (
    alignment_efficiency,
    has_fp8_kernel,
    kernel_seconds,
    matmul_seconds,
    memory_seconds,
    product_dtype,
    product_seconds,
)
from tests.cost.seconds.small_work import MACHINE, small_work

SLOW = small_work(machine=replace(MACHINE, memory_bandwidth=1e9, memory=0.5))
FAST = small_work()


def test_what_moves_bytes_alone_takes_the_bandwidth_that_is_reached() -> None:
    assert kernel_seconds(SLOW, 1e6) == (1e6 / 0.5e9, "memory")


def test_updates_reach_what_the_optimizer_reaches() -> None:
    seconds, binds = kernel_seconds(SLOW, 1e6, update=True)
    # MACHINE's optimizer reaches a half, as its memory does here.
    assert (seconds, binds) == (pytest.approx(1e6 / 0.5e9), "memory")
    other = replace(SLOW, machine=replace(SLOW.machine, optimizer=0.25))
    assert kernel_seconds(other, 1e6, update=True)[0] == pytest.approx(1e6 / 0.25e9)


def test_a_product_is_bound_by_arithmetic_or_by_what_it_moves() -> None:
    sizes = (64, 32, 16, 2, 1)
    moved = 2.0 * (64 * 32 + 32 * 16 + 64 * 16)
    assert kernel_seconds(FAST, moved, product=sizes) == (
        pytest.approx(2 * 64 * 32 * 16 / 1e12),
        "matmul",
    )
    assert kernel_seconds(SLOW, moved, product=sizes) == (pytest.approx(moved / 0.5e9), "memory")
    # A sum in another dtype moves more than its factors say.
    assert kernel_seconds(SLOW, 3 * moved, product=sizes)[0] == pytest.approx(3 * moved / 0.5e9)


def test_products_of_groups_are_so_many_products() -> None:
    machine = replace(MACHINE, tile=128.0, units=132.0, half_depth=64.0)
    one = matmul_seconds(machine, 100.0, 64.0, 200.0, 2.0)
    assert product_seconds(machine, (100, 64, 200, 2, 8)) == pytest.approx(8 * one)


def test_attention_takes_what_it_takes_in_a_block() -> None:
    """A microbatch of 128 positions of which a query meets 64, 64 wide."""
    flops = 4.0 * 128 * 64 * 64
    forward, backward = attention_seconds(FAST)
    assert kernel_seconds(FAST, 0.0, attention=(flops, 64.0, False)) == (
        pytest.approx(float(forward)),
        "attention",
    )
    assert kernel_seconds(FAST, 0.0, attention=(2.5 * flops, 64.0, True)) == (
        pytest.approx(float(backward)),
        "attention",
    )
    assert kernel_seconds(SLOW, 1e12, attention=(flops, 64.0, False)) == (1e12 / 0.5e9, "memory")


TILED = replace(MACHINE, tile=64.0, units=4.0)
WHOLE_S = 2 * 128 * 64 * 128 / 1e12


def test_whole_tiles_on_all_units_lose_nothing() -> None:
    assert matmul_seconds(TILED, 128.0, 64.0, 128.0, 2.0) == pytest.approx(WHOLE_S)


def test_one_row_more_begins_tiles_and_a_wave() -> None:
    # 3 x 2 tiles on 4 units: 6 of 8 places in two waves, and half of the idle ones put to work.
    found = matmul_seconds(TILED, 129.0, 64.0, 128.0, 2.0)
    assert found == pytest.approx(2 * 6 * 64**3 / 1e12 * 8 / 7)


def test_a_product_of_the_half_depth_reaches_half_of_the_rate() -> None:
    deep = replace(TILED, half_depth=64.0)
    assert matmul_seconds(deep, 128.0, 64.0, 128.0, 2.0) == pytest.approx(2 * WHOLE_S)


def test_a_thin_product_takes_as_long_as_its_memory() -> None:
    slow = replace(TILED, memory_bandwidth=1e9, memory=0.5)
    moved = 2.0 * (128 * 64 + 64 * 128 + 128 * 128)
    assert matmul_seconds(slow, 128.0, 64.0, 128.0, 2.0) == pytest.approx(moved / 5e8)
    assert memory_seconds(slow, 1e9) == pytest.approx(2.0)


def test_each_halving_of_the_alignment_costs_a_factor() -> None:
    machine = replace(MACHINE, aligned=0.9)
    found = alignment_efficiency(machine, np.array([128.0, 64.0, 32.0, 8.0, 4.0, 3.0]))
    # Below 8 elements a load is no longer one instruction.
    assert found == pytest.approx([1, 1, 0.9, 0.9**3, 0.4 * 0.9**4, 0.4 * 0.9**6])
    assert alignment_efficiency(MACHINE, np.array([3.0])) == pytest.approx([1.0])


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
