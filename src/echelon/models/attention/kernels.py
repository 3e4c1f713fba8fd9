"""Which kernel computes attention where."""

from __future__ import annotations

import torch

from echelon.models.attention.fused_cpu import FusedCpuKernel
from echelon.models.attention.fused_gpu import HEAD_DIM_MULTIPLE, FusedGpuKernel
from echelon.models.attention.interface import Kernel
from echelon.models.attention.plain import PlainKernel


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, soft_cap: float | None
) -> Kernel:
    """Return the fastest kernel that is right; no fused one has a soft cap."""
    if soft_cap is not None:
        return PlainKernel()
    if device.type == "cpu":
        return FusedCpuKernel()
    fused = dtype != torch.float64 and head_dim % HEAD_DIM_MULTIPLE == 0
    if device.type == "cuda" and torch.version.hip is None and fused:
        return FusedGpuKernel(flash=torch.cuda.get_device_capability(device) >= (8, 0))
    return PlainKernel()
