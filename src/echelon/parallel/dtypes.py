"""The dtypes of a plan as those of torch."""

from __future__ import annotations

import torch

from echelon.core.plan import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
