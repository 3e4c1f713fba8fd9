"""Seconds of one kernel: its FLOPs or its bytes, whichever take longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cost.seconds.block import attention_seconds
from echelon.cost.seconds.kernels import kernel_seconds, product_seconds
from echelon.cost.seconds.matmul import matmul_seconds
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
