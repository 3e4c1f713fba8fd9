# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a model, and seconds of kernels by the shape that a device sees.

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

The shares in presets of devices were fitted to published runs together with the
constants of other trainers, mostly of hundreds of devices: they say what those trainers' steps are
made of. Of our own trainer single kernels were measured, on one device. A device whose preset names
a table of `kernels.toml` is predicted by it for our trainer; each number there has its source and a
band. Beside others, devices are slower than by themselves (`IN_COMPANY`).

FLOPs of a model are what "model FLOPs utilization" divides by. Source: Chowdhery et al., PaLM
(2022), appendix B. Every weight that a token is multiplied by costs 2 FLOPs forward and 4 backward;
full attention costs 12 x layers x width x sequence more. Recompute is not added. Published figures
count full attention, of which a causal mask hides half: pages tell both, and `causal` counts only
the pairs that a causal model has. Of a sliding window only the keys inside count: kernels skip the
rest, and so far beyond a window a figure for the whole sequence would say more than 100 %.
Documents are data: not counted. Of routed experts only the k of a token count, as in a dense model
with the same number of active parameters.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, Literal

import numpy as np

from echelon.core.choices.kernels import cudnn_takes_squares
from echelon.core.cluster import NOT_MEASURED, Cluster, Device
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import (
    EMBEDDING,
    num_active_parameters,
    num_parameters,
    num_trained_parameters,
    parameters,
)
from echelon.core.plan import Plan, Precision
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


IN_COMPANY = 0.95
"""What of these rates a device keeps where others compute beside it: power and cooling that servers
share, clocks that differ. With the kernels of [hopper], published runs on H100 take 1.05 of what
the formulas say: Megatron-Core on 8 to 2,048 of them with cuDNN's attention 1.02 to 1.05, FSDP of
llm-foundry on 16 to 512 with FlashAttention-2 1.04 to 1.08 (medians of each number of devices)."""
MEASURED_DTYPES = ("bf16", "fp16")
FASTEST = "cudnn"
"""What "auto" is where a kernel of cuDNN's takes attention; FlashAttention-3, which was not
measured, counts as it."""


REPLACED = ("matmul", "half_depth", "optimizer", "attention", "attention_backward")
"""What of [device.efficiency] predicts other trainers alone where kernels were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold a number that was measured, with the least and the most that it was."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """Give the shares of the peak that a kernel of attention reaches with heads of some width."""

    kernel: str
    head_dim: int
    forward: Measured
    backward: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernels:
    """Hold what was measured of one generation of devices, and where."""

    source: str
    rates: Mapping[str, Measured]
    attention: tuple[AttentionRates, ...]

    def value(self, name: str) -> float:
        """Return a rate."""
        return self.rates[name].value

    def of_attention(self, kernel: str, head_dim: int) -> AttentionRates:
        """Return the rates of a kernel at the measured width that is nearest to `head_dim`."""
        own = [one for one in self.attention if one.kernel == kernel]
        return min(own, key=lambda one: (abs(one.head_dim - head_dim), one.head_dim))


@cache
def measured_tables() -> Mapping[str, MeasuredKernels]:
    """Return what was measured, by the names that presets of devices give."""
    text = (files("echelon.cost.seconds") / "measured_kernels.toml").read_text(encoding="utf-8")
    return {name: _table(table) for name, table in tomllib.loads(text).items()}


def _table(table: Mapping[str, Any]) -> MeasuredKernels:
    return MeasuredKernels(
        source=table["source"],
        rates={name: _measured(one) for name, one in table["rates"].items()},
        attention=tuple(
            AttentionRates(
                kernel=one["kernel"],
                head_dim=one["head_dim"],
                forward=_measured(one["forward"]),
                backward=_measured(one["backward"]),
            )
            for one in table["attention"]
        ),
    )


def _measured(numbers: Mapping[str, Any]) -> Measured:
    return Measured(**{name: float(numbers[name]) for name in ("value", "low", "high")})


def measured_facts(cluster: Cluster) -> Mapping[str, float]:
    """Return the constants of our trainer that were measured on such devices, by their names."""
    if cluster.device.measured == NOT_MEASURED:
        return {}
    found = measured_tables()[cluster.device.measured]
    # Rates of attention are those of its kernels, not of a device's best one.
    return {"pace": found.value("pace"), "step_s": found.value("step_s"), "fused_share": 1.0}


def replaced_efficiencies(device: Device) -> tuple[str, ...]:
    """Return the efficiencies of a device that do not predict our trainer; () where all do.

    That of memory holds where it is below what was measured.
    """
    if device.measured == NOT_MEASURED:
        return ()
    stream = measured_tables()[device.measured].value("stream_bytes_per_s")
    above = device.efficiency.memory * device.memory_bandwidth > stream
    return (*REPLACED, "memory") if above else REPLACED


def with_measured_kernels(
    machine: MachineNumbers, plan: Plan, *, dtype: str, ranks: int
) -> MachineNumbers:
    """Return a machine with the rates that our trainer's kernels reach on it, where measured.

    `plan` tells which kernel attends, `dtype` in what products are computed: those in 8 bits were
    not measured, and reach as much of their peak as the preset says. So many `ranks` compute at
    once, of all nodes.
    """
    device = plan.cluster.device
    if device.measured == NOT_MEASURED:
        return machine
    found = measured_tables()[device.measured]
    attends = found.of_attention(measured_attention_kernel(plan), plan.model.head_dim)
    keeps = IN_COMPANY if ranks > 1 else 1.0
    stream = found.value("stream_bytes_per_s") / float(machine.memory_bandwidth)
    products = found.value("matmul")
    usual = 1.0 if dtype in MEASURED_DTYPES else machine.matmul / products
    return replace(
        machine,
        peak_flops=usual * machine.peak_flops,
        matmul=keeps * products,
        half_depth=found.value("half_depth"),
        memory=keeps * min(float(machine.memory), stream),
        optimizer=keeps * found.value("optimizer"),
        attention=keeps * attends.forward.value,
        attention_backward=keeps * attends.backward.value,
    )


def measured_attention_kernel(plan: Plan) -> str:
    """Return the kernel by whose rates attention of a plan is predicted.

    cuDNN's takes full and causal squares; windows and documents are left to flash attention, a cap
    on scores to plain products.
    """
    asked, model, device = plan.layout.context.attention, plan.model, plan.cluster.device
    if asked == "plain" or model.soft_cap is not None:
        return "plain"
    windows = model.window is not None and model.window < plan.mathematics.sequence_length
    squares = not windows and plan.mathematics.documents == "joined"
    takes = cudnn_takes_squares(asked, device.capability, model.head_dim)
    return FASTEST if asked == "flash-3" or (squares and takes) else "flash"


EMBEDDING_TABLES = frozenset({EMBEDDING, "positions.weight"})
"""Tables that a token is looked up in: no multiplication, unless the head is tied to one."""


def model_flops_per_token(
    shape: ModelShape, sequence_length: int, *, all_experts: bool = False, causal: bool = False
) -> float:
    """Return the FLOPs of forward and backward per token of a sequence of `sequence_length`.

    `all_experts` routes each token to every expert; `causal` counts for a query of a causal model
    the keys up to its own position only.
    """
    multiplied = multiplied_weights(shape, all_experts=all_experts)
    whole = flops_of_weights(multiplied, shape, sequence_length, causal=causal)
    if shape.lora is None:
        return whole
    # A frozen weight has no gradient: 2 FLOPs forward, and 2 backward for its input's.
    return whole - 2.0 * (multiplied - num_trained_parameters(shape))


def multiplied_weights(shape: ModelShape, *, all_experts: bool = False) -> int:
    """Return the weights that a token is multiplied with."""
    looked_up = sum(prod(s.shape) for s in parameters(shape) if s.name in EMBEDDING_TABLES)
    head = shape.vocab * shape.hidden if shape.tied else 0
    met = num_parameters(shape) if all_experts else num_active_parameters(shape)
    return met - looked_up + head


def flops_of_weights(
    multiplied: int, shape: ModelShape, sequence_length: int, *, causal: bool = False
) -> float:
    """Return the FLOPs of a token that is multiplied with so many weights, attention included."""
    met = causal_positions if causal and shape.causal else attended_positions
    keys = sum(met(shape.of_layer(layer), sequence_length) for layer in range(shape.layers))
    return 6.0 * multiplied + 12.0 * attention_width(shape) * keys


def attended_positions(shape: ModelShape, sequence_length: int) -> int:
    """Return how many positions count for a query of a block with the window, if there is one."""
    if shape.window is None:
        return sequence_length
    return min(sequence_length, shape.window if shape.causal else 2 * shape.window - 1)


def causal_positions(shape: ModelShape, sequence_length: int) -> float:
    """Mean number of keys that a query of a causal block attends to, its own among them."""
    window = attended_positions(shape, sequence_length)
    return window - window * (window - 1) / (2 * sequence_length)


def attention_width(shape: ModelShape) -> float:
    """Return the width at which all heads together meet keys and values."""
    if shape.latent is None:
        return shape.query_dim
    # Queries meet keys at one width and weights meet values at another: the mean of the two.
    key_dim = shape.latent.nope_dim + shape.latent.rope_dim
    return shape.heads * (key_dim + shape.latent.value_dim) / 2
