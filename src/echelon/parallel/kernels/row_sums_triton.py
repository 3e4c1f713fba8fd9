# SPDX-License-Identifier: Apache-2.0
"""Sums of rows for each token as one kernel, in Triton.

A program makes some columns of the sum of one token: it goes over the rows of that token, whose
places it reads itself, and adds them in at least float32. PyTorch's `embedding_bag` does the same
with a number for each thread; here it is 16 bytes.

Shape suffixes: see `row_sums.py`.
"""

# Triton reads what a parameter is annotated with, in a module that no type checker sees.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from echelon.models.precision import at_least_fp32

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

MOST_COLUMNS = 2048
"""Columns that a program takes at most."""

_WIDE: Any = {torch.float32: tl.float32, torch.float64: tl.float64}


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
