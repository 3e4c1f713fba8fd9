# SPDX-License-Identifier: Apache-2.0
"""What experts need beside products: gradients of all matrices at once, and sums of rows.

Gradients: where the host does not know how many rows each expert has, it cannot ask for one product
after the other, and PyTorch's grouped product rounds each sum to the dtype of its rows, makes it
beside what it is added to, and promises nothing of an expert without rows. This one reads where the
rows of an expert end on the device, adds in float32, and rounds once where the sum is of fewer
digits. On a CPU, where a number is read for nothing, it is one product after the other.

Sums of rows for each token are added in one order, and rounded once. Without Triton, and on a CPU,
they are PyTorch's `embedding_bag`, which adds in the same order and dtype.

On a GPU both are kernels in Triton (`expert_kernels_triton.py`).

Shape suffixes: R rows (those of an expert side by side), E experts, O outputs, I inputs, S places
in the order in which rows are added, n tokens, D hidden.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch.nn import functional as fn

from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.parallel.kernels.operators import define_operator
from echelon.parallel.storage.matmul import add_product


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
    kernels = import_module("echelon.parallel.kernels.expert_kernels_triton")
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


define_operator(
    "grouped_weight_gradient_(Tensor(a!) sum, Tensor dy, Tensor x, Tensor ends, bool fresh) -> ()",
    cpu=_on_cpu,
    cuda=_on_gpu,
)


def row_sums(rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor) -> torch.Tensor:
    """Return x_nD: of each token the rows `order_S` from its start to that of the next one.

    The last token takes what is left; one without rows gets zeros. They are added one after the
    other in at least float32, with the same bits on every run, which atomic adds would not have.
    """
    made_nD: torch.Tensor = torch.ops.echelon.row_sums(rows_RD, order_S, starts_n)
    return made_nD


def _sums_on_gpu(
    rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor
) -> torch.Tensor:
    if not _has_triton():
        return _sums_by_pytorch(rows_RD, order_S, starts_n)
    kernels = import_module("echelon.parallel.kernels.expert_kernels_triton")
    return kernels.row_sums(rows_RD, order_S, starts_n)


def _sums_by_pytorch(
    rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor
) -> torch.Tensor:
    return fn.embedding_bag(order_S, rows_RD, starts_n, mode="sum")


def _shapes_of_sums(rows_RD: torch.Tensor, _: torch.Tensor, starts_n: torch.Tensor) -> torch.Tensor:
    return rows_RD.new_empty((len(starts_n), rows_RD.shape[1]))


define_operator(
    "row_sums(Tensor rows, Tensor order, Tensor starts) -> Tensor",
    cpu=_sums_by_pytorch,
    cuda=_sums_on_gpu,
    meta=_shapes_of_sums,
)
