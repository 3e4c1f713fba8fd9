# SPDX-License-Identifier: Apache-2.0
"""The kernels of experts in Triton: gradients of the matrices of all, and sums of rows.

A program makes one tile of the gradient of one expert: it goes over the rows of that expert, whose
ends it reads itself, and adds in float32. So nothing is rounded before it is added to the sum, the
order of a sum is always the same, and an expert without rows costs a load. Programs that run at a
time make tiles that share rows of dy and x, which stay in the second cache.

A program makes some columns of the sum of one token: it goes over the rows of that token, whose
places it reads itself, and adds them in at least float32. PyTorch's `embedding_bag` does the same
with a number for each thread; here it is 16 bytes.

Shape suffixes: see `expert_kernels.py`.
Source: Gale et al., "MegaBlocks", 2022, section 5.1 (the products of a mixture of experts whose
        sizes only the device knows).
"""

# Triton reads what a parameter is annotated with, in a module that no type checker sees.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from echelon.models.precision import at_least_fp32

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

MOST_COLUMNS = 2048
"""Columns that a program takes at most."""

_WIDE: Any = {torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTile:
    """Say what a program makes, and how; no result depends on it but for the order of sums."""

    outputs: int
    """Outputs of a tile."""
    inputs: int
    """Inputs of a tile."""
    rows: int
    """Rows that a program takes at a time."""
    warps: int
    """Warps of a program, 32 threads each."""
    stages: int
    """Steps over rows whose loads are under way at a time."""
    tiles_down: int
    """Tiles one below the other that programs make before those beside them."""


HOPPER_TILE = GradientTile(outputs=128, inputs=128, rows=64, warps=8, stages=3, tiles_down=8)
"""The fastest on an H200 (`bench/results/2026-11-26-gpu-variants.md`)."""


@triton.jit
def gradient_kernel(
    sum_EOI,
    dy_RO,
    x_RI,
    ends_E,
    num_outputs,
    num_inputs,
    gap,
    sum_row,
    dy_row,
    x_row,
    FRESH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    DOWN: tl.constexpr,
) -> None:
    expert = tl.program_id(1).to(tl.int64)
    tiles_across = tl.cdiv(num_inputs, INPUTS)
    above = tl.program_id(0) // (DOWN * tiles_across) * DOWN
    beside = tl.program_id(0) % (DOWN * tiles_across)
    down = min(tl.cdiv(num_outputs, OUTPUTS) - above, DOWN)
    output, input = (above + beside % down) * OUTPUTS, beside // down * INPUTS
    outputs, inputs = output + tl.arange(0, OUTPUTS), input + tl.arange(0, INPUTS)
    start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    count = (tl.load(ends_E + expert) - start).to(tl.int32)
    total = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    rows = tl.arange(0, ROWS)
    # What lies beyond the last column is computed of the first ones again, and not stored.
    dy_places = dy_RO + (start + rows)[:, None] * dy_row + (outputs % num_outputs)[None, :]
    x_places = x_RI + (start + rows)[:, None] * x_row + (inputs % num_inputs)[None, :]
    for _ in range(count // ROWS):
        dy, x = tl.load(dy_places), tl.load(x_places)
        total = tl.dot(tl.trans(dy), x, total, input_precision="ieee")
        dy_places += ROWS * dy_row
        x_places += ROWS * x_row
    if count % ROWS > 0:
        there = rows[:, None] < count % ROWS
        dy = tl.load(dy_places, mask=there, other=0.0)
        x = tl.load(x_places, mask=there, other=0.0)
        total = tl.dot(tl.trans(dy), x, total, input_precision="ieee")
    sum_OI = sum_EOI + expert * gap
    places = sum_OI + outputs[:, None].to(tl.int64) * sum_row + inputs[None, :]
    inside = (outputs[:, None] < num_outputs) & (inputs[None, :] < num_inputs)
    if not FRESH:
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, total.to(sum_EOI.dtype.element_ty), mask=inside)


def add_grouped_gradient(
    sum_EOI: torch.Tensor,
    dy_RO: torch.Tensor,
    x_RI: torch.Tensor,
    ends_E: torch.Tensor,
    *,
    fresh: bool,
    tile: GradientTile = HOPPER_TILE,
) -> None:
    """Add dy^T x of the rows of each expert to its sum, or overwrite a `fresh` one."""
    num_experts, num_outputs, num_inputs = sum_EOI.shape
    dy_RO, x_RI = dy_RO.contiguous(), x_RI.contiguous()
    tiles = -(-num_outputs // tile.outputs) * -(-num_inputs // tile.inputs)
    gradient_kernel[(tiles, num_experts)](
        *(sum_EOI, dy_RO, x_RI, ends_E, num_outputs, num_inputs),
        *(sum_EOI.stride(0), sum_EOI.stride(1), dy_RO.stride(0), x_RI.stride(0)),
        FRESH=fresh,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        ROWS=tile.rows,
        DOWN=tile.tiles_down,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def row_sums_kernel(
    rows_RD,
    order_S,
    starts_n,
    sums_nD,
    num_tokens,
    num_places,
    width,
    row_stride,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    start = tl.load(starts_n + token)
    end = tl.load(starts_n + token + 1, mask=token + 1 < num_tokens, other=num_places)
    total = tl.zeros((COLUMNS,), dtype=WIDE)
    place = order_S + start
    for _ in range((end - start).to(tl.int32)):
        row = tl.load(place).to(tl.int64)
        total += tl.load(rows_RD + row * row_stride + column, mask=inside, other=0.0).to(WIDE)
        place += 1
    tl.store(sums_nD + token * width + column, total.to(sums_nD.dtype.element_ty), mask=inside)


def row_sums(rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each token, [n, D]."""
    num_tokens, width = len(starts_n), rows_RD.shape[1]
    if rows_RD.stride(1) != 1:
        rows_RD = rows_RD.contiguous()
    sums_nD = rows_RD.new_empty((num_tokens, width))
    if not sums_nD.numel():
        return sums_nD
    columns = min(triton.next_power_of_2(width), MOST_COLUMNS)
    row_sums_kernel[(num_tokens, triton.cdiv(width, columns))](
        *(rows_RD, order_S.contiguous(), starts_n.contiguous(), sums_nD),
        *(num_tokens, len(order_S), width, rows_RD.stride(0)),
        WIDE=_WIDE[at_least_fp32(rows_RD.dtype)],
        COLUMNS=columns,
        num_warps=4,
        num_stages=1,
    )
    return sums_nD
