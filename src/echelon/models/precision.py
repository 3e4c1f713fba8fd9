# SPDX-License-Identifier: Apache-2.0
"""The dtypes of a plan, and in which norms, softmax, rotations and losses are computed.

These are computed in at least float32. The activations between them have the dtype of the
parameters; a result is rounded to it once.
"""

from __future__ import annotations

import torch

from echelon.core.plan import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


E4M3 = torch.float8_e4m3fn
"""Numbers of 8 bits with 4 significant ones, of at most 448."""

E5M2 = torch.float8_e5m2
"""Numbers of 8 bits with 3 significant ones, of at most 57344."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""The dtypes that matrices may be multiplied in, and nothing else may be computed in."""


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 in place of a narrower dtype, any other as it is."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return x in at least float32: x itself where it is that already."""
    return x.to(at_least_fp32(x.dtype))
