# SPDX-License-Identifier: Apache-2.0
"""The loss's two passes over logits as one kernel each, in Triton: they read 2 + 2 bytes of bf16
and write 2, where PyTorch's operations move 60.

The package comes with PyTorch's builds for CUDA. The sums of a row have one order, whatever the
device does beside it, so results are reproducible. Shape suffixes: C tokens, V local vocabulary.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (one pass for
maximum and sum); Hsu et al., "Liger Kernel", 2024, section 3.2 (the gradient in place).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_COLUMNS = 4096
"""Columns that a program takes at a time."""

_BLOCK: Any = tl.constexpr(_COLUMNS)

_WARPS = 8
"""Warps of a program, 32 threads each."""


@triton.jit
def _statistics_kernel(logits_CV, local_C, out_3C, num_rows, width) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = logits_CV + row * width
    # A rank that holds only padding has no maximum; any finite number does, its sum is 0.
    maximum = -3.4028234663852886e38
    total = 0.0
    for first in range(0, width, _BLOCK):
        columns = first + tl.arange(0, _BLOCK)
        values = tl.load(start + columns, mask=columns < width, other=-float("inf"))
        values = values.to(tl.float32)
        larger = tl.maximum(maximum, tl.max(values, axis=0))
        total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(values - larger), axis=0)
        maximum = larger
    tl.store(out_3C + row, maximum)
    tl.store(out_3C + num_rows + row, total)
    target = tl.load(start + tl.load(local_C + row)).to(tl.float32)
    tl.store(out_3C + 2 * num_rows + row, target)


@triton.jit
def _gradient_kernel(logits_CV, numbers_2C, label_C, num_rows, width) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    places = logits_CV + row * width + columns
    values = tl.load(places, mask=columns < width, other=-float("inf")).to(tl.float32)
    softmax = tl.exp(values - tl.load(numbers_2C + row))
    one_hot = tl.where(columns == tl.load(label_C + row), 1.0, 0.0)
    gradient = tl.load(numbers_2C + num_rows + row) * (softmax - one_hot)
    tl.store(places, gradient.to(logits_CV.dtype.element_ty), mask=columns < width)


def row_statistics(logits_CV: torch.Tensor, local_C: torch.Tensor) -> torch.Tensor:
    """Return maximum, sum of exp(logit - maximum) and logit `local_C` of each row [3, C]."""
    num_rows, width = logits_CV.shape
    found = torch.empty((3, num_rows), dtype=torch.float32, device=logits_CV.device)
    _statistics_kernel[(num_rows,)](logits_CV, local_C, found, num_rows, width, num_warps=_WARPS)
    return found


def overwrite_with_gradient(
    logits_CV: torch.Tensor,
    log_sum_C: torch.Tensor,
    local_C: torch.Tensor,
    mine_C: torch.Tensor,
    factor_C: torch.Tensor,
) -> None:
    """Turn logits into factor x (softmax - one-hot) in place, each rounded once."""
    num_rows, width = logits_CV.shape
    numbers_2C = torch.stack((log_sum_C, factor_C))
    label_C = torch.where(mine_C, local_C, -1)
    grid = (num_rows, -(-width // _COLUMNS))
    _gradient_kernel[grid](logits_CV, numbers_2C, label_C, num_rows, width, num_warps=_WARPS)
