# SPDX-License-Identifier: Apache-2.0
"""Seconds of kernels, by the shape that a device sees: products, and operators that move bytes.

A product of [m, k] by [k, n] is 2 m n k FLOPs, done in tiles of the result, a tile on each unit
at a time. What is lost: rows and columns of the last tiles (tile quantisation), units that are idle
in the last wave (wave quantisation; kernels that split the depth hide half of it), and the time to
fill a tile, which a deep product amortises: k / (k + half_depth). Below that lies the memory's
bandwidth. Source: NVIDIA, Matrix Multiplication Background User's Guide (2023), sections 2 to 4.

Where a plan multiplies 8-bit numbers, forward products and those for gradients of inputs reach the
device's peak of fp8 if there is a kernel for tiles of 128: PyTorch has one for Hopper. Elsewhere
what codes stand for is multiplied in the dtype of the parameters, at its rate. So are weight
gradients everywhere.

The roofline of counted work (`kernel_seconds`): a kernel takes as long as its FLOPs at the rate
that its shape reaches, or as its bytes at the rate of the memory, whichever is longer (Williams et
al., "Roofline", 2009). The rates are those of the formulas of a block: of products and of
attention, the reached part of the bandwidth for operators that only move bytes, and the rate of
updates for the optimizer.
"""

from __future__ import annotations

import re
from typing import Literal

import numpy as np

from echelon.core.cluster import Cluster
from echelon.core.plan import Precision
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import MachineNumbers, Num, ceil_div, first_number

HIDDEN_OF_WAVE = 0.5
"""Share of the idle units of a last wave that kernels which split the depth put to work."""
ALIGNED = 64
"""Elements of 2 bytes in the 128 bytes to which the fastest kernels want rows aligned."""
LOADED = 8
"""Elements of 2 bytes in the 16 bytes that one instruction loads."""
UNLOADED = 0.4
"""Share of the rate that is left where rows do not begin at 16 bytes."""
MOST_FUSED = 0.85
"""The share of a device's peak that the best fused kernels of attention reach forward."""
MOST_FUSED_BACK = 0.65
"""The same backward."""

_NVIDIA_FP8 = re.compile(r"\b(G?H\d+|G?B\d+|L4|L40S?|RTX)\b", re.IGNORECASE)
"""Names of NVIDIA's devices from Ada on, and of older cards, which have no peak of fp8."""
_HOPPER = re.compile(r"\bG?H(100|200|800|20)\b", re.IGNORECASE)


def matmul_seconds(
    machine: MachineNumbers, rows: Num, depth: Num, columns: Num, element: Num
) -> Num:
    """Return the seconds of [rows, depth] x [depth, columns] in elements of so many bytes."""
    flops = 2.0 * rows * depth * columns
    rate = machine.peak_flops * machine.matmul * _shape_efficiency(machine, rows, depth, columns)
    rate = rate * alignment_efficiency(machine, depth) * alignment_efficiency(machine, columns)
    moved = element * (rows * depth + depth * columns + rows * columns)
    return np.maximum(flops / rate, moved / (machine.memory_bandwidth * machine.memory))


def memory_seconds(machine: MachineNumbers, num_bytes: Num) -> Num:
    """Return the seconds in which the memory of a device reads or writes `num_bytes`."""
    return num_bytes / (machine.memory_bandwidth * machine.memory)


def attention_rates(machine: MachineNumbers, share: Num, reach: Num) -> tuple[Num, Num]:
    """Return the FLOP/s of fused attention, forward and backward.

    `share` is what a trainer's kernels reach of the best of the device, `reach` the keys that a
    query meets in one call.
    """
    peak = machine.attention_flops * share * reach / (reach + machine.half_reach)
    return (
        np.minimum(peak * machine.attention, MOST_FUSED * machine.attention_flops),
        np.minimum(peak * machine.attention_backward, MOST_FUSED_BACK * machine.attention_flops),
    )


def alignment_efficiency(machine: MachineNumbers, size: Num) -> Num:
    """Return the share of the rate that is left where rows of `size` elements are not aligned.

    Kernels load rows in blocks of ALIGNED elements; each halving of the largest power of two that
    divides `size` below that costs a factor `machine.aligned`, and one below LOADED another
    `UNLOADED`: a load is then no longer one instruction. A device whose `aligned` is 1 loads any
    row as fast.
    """
    whole = np.maximum(np.asarray(size), 1.0).astype(np.int64)
    power = np.minimum(whole & -whole, ALIGNED)
    slower = np.where((power < LOADED) & (np.asarray(machine.aligned) < 1.0), UNLOADED, 1.0)
    return slower * machine.aligned ** np.log2(ALIGNED / power)


def _shape_efficiency(machine: MachineNumbers, rows: Num, depth: Num, columns: Num) -> Num:
    tile = machine.tile
    row_tiles = ceil_div(np.maximum(rows, 1.0), tile)
    column_tiles = ceil_div(np.maximum(columns, 1.0), tile)
    filled = rows * columns / (row_tiles * column_tiles * tile * tile)
    tiles = row_tiles * column_tiles
    busy = tiles / (ceil_div(tiles, machine.units) * machine.units)
    busy = busy + HIDDEN_OF_WAVE * (1.0 - busy)
    deep = depth / (depth + machine.half_depth)
    return np.maximum(filled * busy * deep, 1e-6)


def has_fp8_kernel(cluster: Cluster, precision: Precision) -> bool:
    """Return whether a device has a kernel for 8-bit numbers of these scales, told by its name.

    PyTorch multiplies tiles of e4m3 on Hopper, and whole tensors on NVIDIA's devices from Ada on.
    """
    device = cluster.device
    names = _NVIDIA_FP8 if precision.has_tensor_scales else _HOPPER
    return bool(names.search(device.name)) and device.flops("fp8") is not None


def product_dtype(cluster: Cluster, precision: Precision) -> str:
    """Return the dtype at whose peak the forward products of blocks run."""
    return (
        "fp8" if precision.is_fp8 and has_fp8_kernel(cluster, precision) else precision.parameters
    )


Binds = Literal["matmul", "attention", "memory"]
"""What a kernel spends its seconds on."""

ProductSizes = tuple[int, int, int, int, int]
"""Rows, depth, columns, bytes of an element, and how many such products there are."""


def product_seconds(machine: MachineNumbers, sizes: ProductSizes) -> float:
    """Return the seconds of products at the rate that their shape reaches."""
    rows, depth, columns, element, times = sizes
    return times * first_number(matmul_seconds(machine, rows, depth, columns, float(element)))


def kernel_seconds(
    work: CostInputs,
    num_bytes: float,
    *,
    product: ProductSizes | None = None,
    attention: tuple[float, float, bool] | None = None,
    update: bool = False,
) -> tuple[float, Binds]:
    """Return the seconds of a kernel, and what binds it.

    Of `attention` are given the FLOPs that are done, the keys that a query meets, and whether it is
    the backward pass; an `update` is the optimizer's.
    """
    machine = work.machine
    moving = first_number(memory_seconds(machine, num_bytes))
    if update:
        return moving * first_number(machine.memory) / first_number(machine.optimizer), "memory"
    if product is not None:
        computing = product_seconds(machine, product)
        # Both take the larger of arithmetic and of the bytes of their own sizes.
        rows, depth, columns, element, times = product
        least = element * times * (rows * depth + depth * columns + rows * columns)
        bound = computing <= first_number(memory_seconds(machine, max(num_bytes, least)))
        return max(computing, moving), "memory" if bound else "matmul"
    if attention is not None:
        flops, keys, backward = attention
        rates = attention_rates(machine, work.software.fused_share, keys)
        computing = flops / first_number(rates[backward])
        return max(computing, moving), "attention" if computing > moving else "memory"
    return moving, "memory"
