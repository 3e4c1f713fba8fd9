# SPDX-License-Identifier: Apache-2.0
"""Gradients of the matrices of all experts, each added up where it lies, in one launch.

Where the host does not know how many rows each expert has, it cannot ask for one product after the
other, and PyTorch's grouped product rounds each sum to the dtype of its rows, makes it beside what
it is added to, and promises nothing of an expert without rows. This one reads where the rows of an
expert end on the device (`grouped_gradient_triton.py`), adds in float32, and rounds once where the
sum is of fewer digits. On a CPU, where a number is read for nothing, it is one product after the
other.

Shape suffixes: R rows (those of an expert side by side), E experts, O outputs, I inputs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch

from echelon.models.piece_sizes import TRAINING_PIECES
from echelon.parallel.kernels.matmul import add_product

_LIBRARY = torch.library.Library("echelon", "FRAGMENT")
_LIBRARY.define(
    "grouped_weight_gradient_(Tensor(a!) sum, Tensor dy, Tensor x, Tensor ends, bool fresh) -> ()"
)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def adds_grouped_gradients(x_RI: torch.Tensor) -> bool:
    """Return whether a device adds up the gradients of all experts without asking the host."""
    return not x_RI.is_cuda or _has_triton()


def add_grouped_gradient(
    sum_EOI: torch.Tensor,
    dy_RO: torch.Tensor,
    x_RI: torch.Tensor,
    ends_E: torch.Tensor,
    *,
    fresh: bool,
) -> None:
    """Add dy^T x of the rows of each expert to its sum, or overwrite a `fresh` one.

    Rows beyond the last end belong to no expert. Each sum is made in one order, so it has the same
    bits on every run; an expert without rows adds zero.
    """
    torch.ops.echelon.grouped_weight_gradient_(sum_EOI, dy_RO, x_RI, ends_E, fresh)


def _on_gpu(
    sum_EOI: torch.Tensor,
    dy_RO: torch.Tensor,
    x_RI: torch.Tensor,
    ends_E: torch.Tensor,
    fresh: bool,
) -> None:
    kernels = import_module("echelon.parallel.kernels.grouped_gradient_triton")
    kernels.add_grouped_gradient(sum_EOI, dy_RO, x_RI, ends_E, fresh=fresh)


def _on_cpu(
    sum_EOI: torch.Tensor,
    dy_RO: torch.Tensor,
    x_RI: torch.Tensor,
    ends_E: torch.Tensor,
    fresh: bool,
) -> None:
    rows = TRAINING_PIECES.product_rows
    for sum_OI, (start, end) in zip(sum_EOI, pairwise([0, *ends_E.tolist()]), strict=True):
        add_product(sum_OI, dy_RO[start:end], x_RI[start:end], fresh=fresh, num_rows=rows)


def _on_shapes(*_: object) -> None:
    """Make nothing: the sums are there."""


_LIBRARY.impl("grouped_weight_gradient_", _on_gpu, "CUDA")
_LIBRARY.impl("grouped_weight_gradient_", _on_cpu, "CPU")
_LIBRARY.impl("grouped_weight_gradient_", _on_shapes, "Meta")
