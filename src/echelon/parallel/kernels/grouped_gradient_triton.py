"""The gradients of the matrices of all experts as one kernel, in Triton.

A program makes one tile of the gradient of one expert: it goes over the rows of that expert, whose
ends it reads itself, and adds in float32. So nothing is rounded before it is added to the sum, the
order of a sum is always the same, and an expert without rows costs a load.

Shape suffixes: see `grouped_gradient.py`.
Source: Gale et al., "MegaBlocks", 2022, section 5.1 (the products of a mixture of experts whose
        sizes only the device knows).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_TILE = 128
"""Outputs and inputs of a tile."""

_ROWS = 64
"""Rows that a program takes at a time."""

_BLOCK: Any = tl.constexpr(_TILE)
_DEPTH: Any = tl.constexpr(_ROWS)

_WARPS = 8
"""Warps of a program, 32 threads each."""

_STAGES = 3
"""Steps over rows whose loads are under way at a time."""


@triton.jit
def _gradient_kernel(
    sum_EOI, dy_RO, x_RI, ends_E, num_outputs, num_inputs, gap, sum_row, dy_row, x_row, fresh
) -> None:
    expert = tl.program_id(1).to(tl.int64)
    tiles_across = tl.cdiv(num_inputs, _BLOCK)
    outputs = tl.program_id(0) // tiles_across * _BLOCK + tl.arange(0, _BLOCK)
    inputs = tl.program_id(0) % tiles_across * _BLOCK + tl.arange(0, _BLOCK)
    start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_E + expert)
    total = tl.zeros((_BLOCK, _BLOCK), dtype=tl.float32)
    for first in range(start, end, _DEPTH):
        rows = (first + tl.arange(0, _DEPTH)).to(tl.int64)
        there = rows[:, None] < end
        dy = tl.load(
            dy_RO + rows[:, None] * dy_row + outputs[None, :],
            mask=there & (outputs[None, :] < num_outputs),
            other=0.0,
        )
        x = tl.load(
            x_RI + rows[:, None] * x_row + inputs[None, :],
            mask=there & (inputs[None, :] < num_inputs),
            other=0.0,
        )
        total += tl.dot(tl.trans(dy), x)
    places = sum_EOI + expert * gap + outputs[:, None].to(tl.int64) * sum_row + inputs[None, :]
    inside = (outputs[:, None] < num_outputs) & (inputs[None, :] < num_inputs)
    if fresh == 0:
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, total.to(sum_EOI.dtype.element_ty), mask=inside)


def add_grouped_gradient(
    sum_EOI: torch.Tensor,
    dy_RO: torch.Tensor,
    x_RI: torch.Tensor,
    ends_E: torch.Tensor,
    *,
    fresh: bool,
) -> None:
    """Add dy^T x of the rows of each expert to its sum, or overwrite a `fresh` one."""
    num_experts, num_outputs, num_inputs = sum_EOI.shape
    dy_RO, x_RI = dy_RO.contiguous(), x_RI.contiguous()
    tiles = -(-num_outputs // _TILE) * -(-num_inputs // _TILE)
    _gradient_kernel[(tiles, num_experts)](
        *(sum_EOI, dy_RO, x_RI, ends_E, num_outputs, num_inputs),
        *(sum_EOI.stride(0), sum_EOI.stride(1), dy_RO.stride(0), x_RI.stride(0), int(fresh)),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
