# SPDX-License-Identifier: Apache-2.0
"""Kernels: which compute attention on a rank, and which compute the pieces between products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from echelon.core.settings.configured import Configured
from echelon.core.settings.list_types import ChoiceList
from echelon.core.settings.value_types import Choice

AttentionKernel = Literal["auto", "flash", "flash-3", "cudnn", "plain"]

ANY_HEAD_DIM = 1 << 20  # elements
CUDNN_GENERATIONS = (9, 10)
"""Generations of GPUs, by their major compute capability, on which cuDNN's kernel is faster than
FlashAttention-2: Hopper and Blackwell (PyTorch's own choice, check_prefer_cudnn_attention in
transformers/cuda/sdp_utils.cpp)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernelRecord:
    """Say what a kernel takes, and where it is from."""

    dtypes: tuple[str, ...] = ("bf16", "fp16")
    """Dtypes of parameters that it takes."""
    max_head_dim: int
    """The widest heads that it takes, in elements."""
    head_dim_multiple: int = 8
    """What the width of heads is a multiple of."""
    backends: tuple[str, ...] = ("nccl",)
    """The backends of clusters whose devices have it."""
    soft_cap: bool = False
    """Whether it takes a cap on scores."""
    facts: str
    """What it does in one call, in words."""
    source: str
    """Where its conditions are from."""


ATTENTION_KERNELS: Mapping[str, AttentionKernelRecord] = {
    "flash": AttentionKernelRecord(
        max_head_dim=256,
        facts="any window, and all documents of a batch, in one call; from Ampere on",
        source="PyTorch, native/transformers/cuda/flash_attn; Dao, 2023",
    ),
    "flash-3": AttentionKernelRecord(
        max_head_dim=256,
        facts="as flash, on Hopper, where the package flash_attn_interface is installed",
        source="PyTorch, torch.nn.attention._fa3; Shah et al., FlashAttention-3, 2024",
    ),
    "cudnn": AttentionKernelRecord(
        max_head_dim=128,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendedRun:
    """Say of a run what decides which kernels take its attention."""

    backend: str
    dtype: str
    head_dim: int
    soft_cap: bool
    capability: float = 0.0
    """The compute capability of the cluster's device; 0: not known."""


def misfits(kernel: str, run: AttendedRun) -> tuple[str, ...]:
    """Return why a kernel does not take a run, each reason with its numbers; none: it does."""
    record, head_dim = ATTENTION_KERNELS[kernel], run.head_dim
    found: list[str] = []
    if run.backend not in record.backends:
        found.append(f"it runs on {_joined(record.backends)}, and the cluster is {run.backend}")
    if run.dtype not in record.dtypes:
        found.append(f"it takes {_joined(record.dtypes)}, and parameters are {run.dtype}")
    if head_dim % record.head_dim_multiple:
        left = head_dim % record.head_dim_multiple
        found.append(
            f"it takes heads of a multiple of {record.head_dim_multiple} elements, and head_dim is "
            f"{head_dim} ({head_dim} % {record.head_dim_multiple} = {left})"
        )
    if head_dim > record.max_head_dim:
        found.append(
            f"it takes heads of up to {record.max_head_dim} elements, and head_dim is {head_dim}"
        )
    if run.soft_cap and not record.soft_cap:
        found.append("it has no cap on scores, and the model has one")
    return tuple(found)


def cudnn_takes_squares(kernel: AttentionKernel, capability: float, head_dim: int) -> bool:
    """Return whether cuDNN's kernel attends where flash attention could, in full or causal squares.

    FlashAttention-3, which only a machine knows of, comes before it under "auto".
    """
    chosen = kernel == "cudnn" or (kernel == "auto" and int(capability) in CUDNN_GENERATIONS)
    return chosen and head_dim <= ATTENTION_KERNELS["cudnn"].max_head_dim


def kernel_text(kernel: AttentionKernel, run: AttendedRun) -> str:
    """Return what attends in a run, in words; "auto" is resolved as `models.attention` does."""
    if kernel != "auto":
        return f"{kernel}: {ATTENTION_KERNELS[kernel].facts}"
    plain = f"plain: {ATTENTION_KERNELS['plain'].facts}"
    if run.soft_cap:
        return plain
    if run.backend != "nccl":
        return "flash attention of PyTorch for a CPU, a call for each piece"
    if run.dtype == "fp64" or run.head_dim % ATTENTION_KERNELS["flash"].head_dim_multiple:
        return plain
    if misfits("flash", run):
        return "memory-efficient attention of PyTorch, a call for each piece"
    if cudnn_takes_squares(kernel, run.capability, run.head_dim):
        text = "cudnn for full and causal squares, flash for windows and documents"
        return f"{text}; {_THIRD} for all" if int(run.capability) == _HOPPER else text
    names = f"flash, {_THIRD}" if int(run.capability) in (0, _HOPPER) else "flash"
    return f"{names}: any window and all documents in one call"


_HOPPER = 9  # major compute capability, the only one that FlashAttention-3 is for
_THIRD = "flash-3 where it is installed"


def _joined(words: tuple[str, ...]) -> str:
    return " or ".join(words)


KernelProvider = Literal["plain", "triton", "compiled"]
FusedPiece = Literal["norm", "residual", "rotary", "swiglu", "loss", "update"]

FUSED_PIECES: tuple[FusedPiece, ...] = get_args(FusedPiece)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Say what computes the pieces between products: PyTorch's operations, or one kernel for each.

    Of the pieces in `fused`, each is one kernel of `provider`: of our own in Triton, or what
    PyTorch's compiler makes of the formula. "residual" is the sum before a norm, and in backward
    the sum of both ways around a branch, in the kernel of the norm. "update" is that of parameters,
    casts included; only Triton has it.
    """

    provider: Annotated[
        KernelProvider,
        Configured(
            "what computes norms, rotations and the like; auto: triton on GPUs, plain on CPUs",
            Choice(options=("auto", "plain", "triton", "compiled")),
            default="auto",
        ),
    ] = "plain"
    fused: Annotated[
        tuple[FusedPiece, ...],
        Configured(
            "the pieces that are one kernel each; auto: those that the run has",
            ChoiceList(options=FUSED_PIECES),
            default="auto",
        ),
    ] = ()

    def of(self, piece: FusedPiece) -> KernelProvider:
        """Return what computes a piece."""
        return self.provider if piece in self.fused else "plain"
