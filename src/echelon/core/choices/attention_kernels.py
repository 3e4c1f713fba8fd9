"""The kernels of attention that a GPU may have, each as one record: what it takes.

Every one of them returns the log-sum-exp of its scores, without which the results of pieces cannot
be merged. What a kernel does not take is left to the next: flash attention where cuDNN's does not
take a piece, the memory-efficient kernel in float32, plain products in float64 and with a cap on
scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["auto", "flash", "flash-3", "cudnn", "plain"]

ANY_HEAD_DIM = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernelRecord:
    """Say what a kernel takes, and where it is from."""

    dtypes: tuple[str, ...]
    """Dtypes of parameters that it takes."""
    max_head_dim: int
    """The widest heads that it takes, in elements."""
    head_dim_multiple: int
    """What the width of heads is a multiple of."""
    backends: tuple[str, ...]
    """The backends of clusters whose devices have it."""
    soft_cap: bool
    """Whether it takes a cap on scores."""
    facts: str
    """What it does in one call, in words."""
    source: str
    """Where its conditions are from."""


_LOW_PRECISION = ("bf16", "fp16")

ATTENTION_KERNELS: Mapping[str, AttentionKernelRecord] = {
    "flash": AttentionKernelRecord(
        dtypes=_LOW_PRECISION,
        max_head_dim=256,
        head_dim_multiple=8,
        backends=("nccl",),
        soft_cap=False,
        facts="any window, and all documents of a batch, in one call; from Ampere on",
        source="PyTorch, aten/src/ATen/native/transformers/cuda/flash_attn; Dao, 2023",
    ),
    "flash-3": AttentionKernelRecord(
        dtypes=_LOW_PRECISION,
        max_head_dim=256,
        head_dim_multiple=8,
        backends=("nccl",),
        soft_cap=False,
        facts="as flash, on Hopper, where the package flash_attn_interface is installed",
        source="PyTorch, torch/nn/attention/_fa3.py; Shah et al., FlashAttention-3, 2024",
    ),
    "cudnn": AttentionKernelRecord(
        dtypes=_LOW_PRECISION,
        max_head_dim=128,
        head_dim_multiple=8,
        backends=("nccl",),
        soft_cap=False,
        facts="full and causal squares; windows and documents are left to flash",
        source="PyTorch, check_cudnn_tensor_shapes in transformers/cuda/sdp_utils.cpp",
    ),
    "plain": AttentionKernelRecord(
        dtypes=("bf16", "fp16", "fp32", "fp64"),
        max_head_dim=ANY_HEAD_DIM,
        head_dim_multiple=1,
        backends=("nccl", "gloo"),
        soft_cap=True,
        facts="products of PyTorch, a block of scores at a time, on every device",
        source="models/attention/plain.py",
    ),
}
"""By the names that `context.attention` takes; "auto" is the fastest that is there."""
