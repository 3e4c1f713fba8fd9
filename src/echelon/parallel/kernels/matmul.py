"""Products with a weight matrix, by the faster of PyTorch's two libraries.

On a CPU `mm` is MKL, which gives what Intel did not make its AVX2 kernels. oneDNN, which PyTorch
also carries, uses AVX-512 wherever the CPU has it: a tenth faster on an AMD EPYC (Zen 4). It needs
the rows of the left matrix to be contiguous, so it is not for gradients of weights (dy^T x).

Shape suffixes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch

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
