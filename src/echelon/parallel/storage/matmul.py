# SPDX-License-Identifier: Apache-2.0
"""Products with a weight matrix, by the faster of PyTorch's two libraries, and for its gradient.

On a CPU `mm` is MKL, which gives what Intel did not make its AVX2 kernels. oneDNN, which PyTorch
also carries, uses AVX-512 wherever the CPU has it: a tenth faster on an AMD EPYC (Zen 4). It needs
the rows of the left matrix to be contiguous, so it is not for gradients of weights (dy^T x).

Shape suffixes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from echelon.models.precision import LOW_PRECISION

_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""What `torch.compile` calls on a CPU; a build without oneDNN does not have it."""

_MIN_ONEDNN_WORK = 1 << 24
"""Multiplications from which on oneDNN is faster: it takes 10 us more to start."""


def matmul(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight^T, where no gradient is asked for; the weight may be a transposed view.

    It is written into `out` where that is given.
    """
    if (
        _ONEDNN is not None
        and x_NI.dtype == torch.float32
        and x_NI.device.type == "cpu"
        and x_NI.shape[0] * weight_OI.numel() >= _MIN_ONEDNN_WORK
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and torch.backends.mkldnn.is_available()
    ):
        made_NO: torch.Tensor = _ONEDNN(x_NI, weight_OI, None, "none", [], "")
        return made_NO if out is None else out.copy_(made_NO)
    return torch.mm(x_NI, weight_OI.t(), out=out) if out is not None else x_NI @ weight_OI.t()


def add_product(
    sum_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, *, fresh: bool, num_rows: int
) -> None:
    """Add dy^T x to a sum, or overwrite it where it is `fresh`; nothing is rounded before.

    Where the sum is of a wider dtype a GPU's library adds in it. On a CPU PyTorch has no such
    product: `num_rows` rows of both are widened at a time.
    """
    if sum_OI.dtype == x_NI.dtype:
        _add(sum_OI, dy_NO, x_NI, fresh=fresh)
    elif _adds_wider(sum_OI, x_NI):
        # The sum may have the dtype of the result since PyTorch 2.10 (pull request 167931).
        if fresh:
            torch.mm(dy_NO.t(), x_NI, out_dtype=sum_OI.dtype, out=sum_OI)
        else:
            torch.addmm(sum_OI, dy_NO.t(), x_NI, out_dtype=sum_OI.dtype, out=sum_OI)
    else:
        if fresh:
            sum_OI.zero_()
        for dy_nO, x_nI in zip(dy_NO.split(num_rows), x_NI.split(num_rows), strict=True):
            _add(sum_OI, dy_nO.to(sum_OI.dtype), x_nI.to(sum_OI.dtype), fresh=False)


def _adds_wider(sum_OI: torch.Tensor, x_NI: torch.Tensor) -> bool:
    on_gpu = sum_OI.is_cuda or sum_OI.is_meta  # or is rehearsed
    return on_gpu and sum_OI.dtype == torch.float32 and x_NI.dtype in LOW_PRECISION


def _add(sum_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, *, fresh: bool) -> None:
    if fresh:
        torch.mm(dy_NO.t(), x_NI, out=sum_OI)
    else:
        sum_OI.addmm_(dy_NO.t(), x_NI)
