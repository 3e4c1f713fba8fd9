"""What is measured of a machine: FLOPs and names of kernels, and the shapes of both workloads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest

from echelon.cost.fit.samples import (
    KIB,
    MEMORY_OPERATORS,
    UPDATE_BYTES,
    Collective,
    FusedAttentionKernel,
    LaunchKernel,
    MatmulKernel,
    MemoryKernel,
    OptimizerKernel,
    Workload,
    cpu_workload,
    gpu_workload,
    held_out_of,
)


def test_flops_by_hand() -> None:
    assert MatmulKernel(rows=2, depth=3, columns=5, batch=7).flops == 2 * 2 * 3 * 5 * 7
    forward = FusedAttentionKernel(sequences=2, heads=3, length=4, head_dim=8)
    # Ten of sixteen pairs are visible; each is met twice, by scores and by values.
    assert forward.flops == 2 * 3 * 10 * 8 * 4
    backward = FusedAttentionKernel(sequences=2, heads=3, length=4, head_dim=8, backward=True)
    assert backward.flops == 2.5 * forward.flops


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        (MatmulKernel(rows=64, depth=128, columns=32), "64x128x32"),
        (MatmulKernel(rows=64, depth=128, columns=32, batch=8), "8 x 64x128x32"),
        (FusedAttentionKernel(sequences=1, heads=4, length=16, head_dim=8), "1 x 4 heads, 16x8"),
        (MemoryKernel(name="copy", num_bytes=3 * 2**19), "copy 1.5 MiB"),
        (LaunchKernel(name="add"), "add"),
        (OptimizerKernel(elements=4096, num_bytes=1), "AdamW of 4,096"),
        (Collective(kind="send", degree=2, num_bytes=4 * KIB), "send 2 ranks 4 KiB"),
        (Collective(kind="all_reduce", degree=4, num_bytes=2**21), "all_reduce 4 ranks 2 MiB"),
        (Collective(kind="send", degree=2, num_bytes=KIB, stride=8), "send 2 ranks, 8 apart 1 KiB"),
    ],
    ids=str,
)
def test_samples_are_named_by_their_shape(sample: object, name: str) -> None:
    shown = str(sample)
    assert shown.removesuffix(" forward") == name


@pytest.mark.parametrize("workload", [cpu_workload, gpu_workload])
def test_a_workload_has_every_kind_of_kernel_in_order(
    workload: Callable[[float], Workload],
) -> None:
    work = workload(0.25)
    assert work.window_s == 0.25
    assert 55 <= len(work.kernels) <= 65
    kinds = [kind for kind, _ in groupby(map(type, work.kernels))]
    order = [LaunchKernel, MatmulKernel, FusedAttentionKernel, MemoryKernel, OptimizerKernel]
    assert kinds == order
    moves = [one for one in work.kernels if isinstance(one, MemoryKernel)]
    assert {one.name for one in moves} == set(MEMORY_OPERATORS)
    updates = [one for one in work.kernels if isinstance(one, OptimizerKernel)]
    assert all(one.num_bytes == UPDATE_BYTES * one.elements for one in updates)
    attention = [one for one in work.kernels if isinstance(one, FusedAttentionKernel)]
    assert sum(one.backward for one in attention) == len(attention) // 2
    assert (work.sizes[0], work.sizes[-1]) == (KIB, 64 * 2**20)


def test_graphics_processors_get_more_work() -> None:
    small, large = (max(one.flops for one in w(0.1).matmuls) for w in (cpu_workload, gpu_workload))
    assert small < 0.3e9
    assert 1e12 < large < 4e12


def test_neither_end_of_a_curve_is_held_out() -> None:
    assert [*held_out_of(range(9))] == [1, 4, 7]
    assert [*held_out_of(range(3))] == [1]
    assert [*held_out_of(range(2))] == []


@pytest.mark.parametrize("workload", [cpu_workload, gpu_workload])
def test_sizes_of_every_curve_are_held_out_and_most_are_fitted(
    workload: Callable[[float], Workload],
) -> None:
    work = workload(0.25)
    assert work.held_out <= set(work.kernels)
    assert {type(one) for one in work.held_out} == {type(one) for one in work.kernels} - {
        LaunchKernel
    }
    assert {one.name for one in work.held_out if isinstance(one, MemoryKernel)} == set(
        MEMORY_OPERATORS
    )
    products = [one for one in work.held_out if isinstance(one, MatmulKernel)]
    assert len(work.matmuls) / 6 < len(products) < len(work.matmuls) / 3
    largest = max(work.matmuls, key=lambda one: one.flops)
    assert largest not in products
    assert work.held_out_sizes < set(work.sizes)
    assert not work.held_out_sizes & {work.sizes[0], work.sizes[-1]}


def test_groups_beside_one_another_are_the_first_ranks() -> None:
    assert Collective(kind="send", degree=3, num_bytes=1, stride=4).num_ranks == 12
