# SPDX-License-Identifier: Apache-2.0
"""What computes the pieces of a step that are between its products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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

    provider: KernelProvider = "plain"
    fused: tuple[FusedPiece, ...] = ()

    def of(self, piece: FusedPiece) -> KernelProvider:
        """Return what computes a piece."""
        return self.provider if piece in self.fused else "plain"
