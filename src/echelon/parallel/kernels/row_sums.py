# SPDX-License-Identifier: Apache-2.0
"""Sums of rows for each token, of what its experts made: in one order, rounded once.

On a GPU it is a kernel in Triton that reads each row at the speed of memory (`row_sums_triton.py`);
without Triton, and on a CPU, PyTorch's `embedding_bag`, which adds in the same order and dtype.

Shape suffixes: R rows, S places in the order in which rows are added, n tokens, D hidden.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch.nn import functional as fn

_LIBRARY = torch.library.Library("echelon", "FRAGMENT")
_LIBRARY.define("row_sums(Tensor rows, Tensor order, Tensor starts) -> Tensor")


def row_sums(rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor) -> torch.Tensor:
    """Return x_nD: of each token the rows `order_S` from its start to that of the next one.

    The last token takes what is left; one without rows gets zeros. They are added one after the
    other in at least float32, with the same bits on every run, which atomic adds would not have.
    """
    made_nD: torch.Tensor = torch.ops.echelon.row_sums(rows_RD, order_S, starts_n)
    return made_nD


def _on_gpu(rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor) -> torch.Tensor:
    if find_spec("triton") is None:
        return _by_pytorch(rows_RD, order_S, starts_n)
    kernels = import_module("echelon.parallel.kernels.row_sums_triton")
    return kernels.row_sums(rows_RD, order_S, starts_n)


def _by_pytorch(
    rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor
) -> torch.Tensor:
    return fn.embedding_bag(order_S, rows_RD, starts_n, mode="sum")


def _on_shapes(rows_RD: torch.Tensor, _: torch.Tensor, starts_n: torch.Tensor) -> torch.Tensor:
    return rows_RD.new_empty((len(starts_n), rows_RD.shape[1]))


_LIBRARY.impl("row_sums", _on_gpu, "CUDA")
_LIBRARY.impl("row_sums", _by_pytorch, "CPU")
_LIBRARY.impl("row_sums", _on_shapes, "Meta")
