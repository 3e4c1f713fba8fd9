# SPDX-License-Identifier: Apache-2.0
"""The pieces between products as autograd functions over one kernel each way.

The residual stream and its norm come out of one kernel at the head of a branch (`Branch`): forward
adds what the branch before gave, backward adds what comes around this one. What is kept for
backward is what the plain kernels keep (`fused.py`): the stream, a number for each row, gate and
up, the projections of attention.

Shape suffixes: N tokens, R rows, D hidden, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.core.choices.kernels import KernelProvider
from echelon.parallel.gradients import GradientStore
from echelon.parallel.kernels.piece_operators import PIECES
from echelon.parallel.recompute import Remade


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKernel:
    """Say of a norm what its kernels need beside the tensors: weight, eps, provider, store."""

    weight: nn.Parameter
    eps: float
    provider: KernelProvider
    store: GradientStore

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        inverse: torch.Tensor,
        around: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return dx, with the gradient that came `around` added; the weight's goes to the store."""
        rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx_RD, sums_PD = PIECES.piece_norm_backward(
            *rows, inverse, self.weight, around, self.provider
        )
        self.store.add(self.weight, total(sums_PD))
        return dx_RD.view(x.shape)


def total(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum of partial sums, which lie along the first dim, always in one order."""
    return sums[0] if len(sums) == 1 else sums.sum(0)


class FusedNorm(torch.autograd.Function):
    """Root-mean-square norm over the last dim."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: NormKernel) -> torch.Tensor:
        """Return x / rms(x) * weight; keep x and the inverse rms."""
        y_RD, inverse = PIECES.piece_norm(
            x.reshape(-1, x.shape[-1]), kernel.weight, kernel.eps, kernel.provider
        )
        ctx.save_for_backward(x, inverse)
        ctx.kernel = kernel
        return y_RD.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx."""
        return ctx.kernel.backward(dy, *ctx.saved_tensors), None


class RemadeNorm(Remade):
    """Make the norm of a stream again for the layer that reads it; backward takes its numbers."""

    def __init__(self, kernel: NormKernel) -> None:
        """Know no stream yet."""
        self._kernel = kernel
        self._x: torch.Tensor | None = None
        self._inverse: torch.Tensor | None = None

    def keep(self, x_ND: torch.Tensor) -> None:
        """Learn of the stream, which the branch keeps anyway."""
        self._x = x_ND

    def make(self) -> torch.Tensor:
        """Return the norm."""
        assert self._x is not None, "the layer that reads it runs backward once"
        one = self._kernel
        y, self._inverse = PIECES.piece_norm(self._x, one.weight, one.eps, one.provider)
        return y

    def take(self) -> torch.Tensor:
        """Return the inverse rms; let go of all."""
        assert self._inverse is not None, "backward of the layer that reads it comes first"
        inverse, self._inverse, self._x = self._inverse, None, None
        return inverse


class Branch(torch.autograd.Function):
    """The head of a branch: the stream with what the branch before gave added, and its norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        added_ND: torch.Tensor | None,
        kernel: NormKernel,
        remade: RemadeNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream and its norm, both [N, D]; keep the stream and the inverse rms.

        Where the norm is made again, so is the inverse rms.
        """
        eps, provider = kernel.eps, kernel.provider
        if added_ND is None:
            normed_ND, inverse = PIECES.piece_norm(x_ND, kernel.weight, eps, provider)
        else:
            x_ND, normed_ND, inverse = PIECES.piece_add_norm(
                x_ND, added_ND, kernel.weight, eps, provider
            )
        ctx.kernel, ctx.remade, ctx.adds = kernel, remade, added_ND is not None
        if remade is None:
            ctx.save_for_backward(x_ND, inverse)
        else:
            ctx.save_for_backward(x_ND)
            remade.keep(x_ND.detach())
        return x_ND, normed_ND

    @staticmethod
    def backward(
        ctx: Any, around_ND: torch.Tensor, dy_ND: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the stream, which is that of what was added, too."""
        x_ND = ctx.saved_tensors[0]
        inverse = ctx.saved_tensors[1] if ctx.remade is None else ctx.remade.take()
        dx_ND = ctx.kernel.backward(dy_ND, x_ND, inverse, around_ND)
        return dx_ND, dx_ND if ctx.adds else None, None, None


class FusedSwiGLU(torch.autograd.Function):
    """silu(gate) * up; keeps gate and up only."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, provider: KernelProvider) -> torch.Tensor:
        """Return the product, [N, F], for gate and up side by side."""
        ctx.save_for_backward(gate_up)
        ctx.provider = provider
        return PIECES.piece_swiglu(gate_up, None, provider)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of gate and up, side by side."""
        return PIECES.piece_swiglu_backward(dy, *ctx.saved_tensors, ctx.provider), None


class FusedRotate(torch.autograd.Function):
    """Turn half-pairs by their position."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cos_TE: torch.Tensor,
        sin_TE: torch.Tensor,
        provider: KernelProvider,
    ) -> torch.Tensor:
        """Return x [T, B, heads, head_dim] turned."""
        ctx.save_for_backward(cos_TE, sin_TE)
        ctx.provider = provider
        return PIECES.piece_rotate(x, cos_TE, sin_TE, 1, provider)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dy turned back."""
        turned = PIECES.piece_rotate(dy, *ctx.saved_tensors, -1, ctx.provider)
        return turned, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsKernel:
    """Say how many of the heads are queries, and what norms them, where anything does."""

    num_queries: int
    num_keys: int
    tables: tuple[torch.Tensor, torch.Tensor]
    provider: KernelProvider
    store: GradientStore
    weights: tuple[nn.Parameter, ...] = ()
    eps: float = 0.0


class FusedHeads(torch.autograd.Function):
    """Queries and keys, normed and turned, and values, of the projections side by side."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, kernel: HeadsKernel
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k, v of qkv [T, B, heads, head_dim]; v is a view, which keeps it."""
        both = kernel.num_queries + kernel.num_keys
        q, k, inverse = PIECES.piece_heads(
            qkv[:, :, :both],
            kernel.num_queries,
            list(kernel.tables),
            list(kernel.weights),
            kernel.eps,
            kernel.provider,
        )
        ctx.kernel = kernel
        ctx.save_for_backward(*kernel.tables, *((qkv, inverse) if kernel.weights else ()))
        return q, k, qkv[:, :, both:]

    @staticmethod
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return the gradient of the projections; those of weights go to the store."""
        kernel: HeadsKernel = ctx.kernel
        cos_TE, sin_TE, *normed = ctx.saved_tensors
        if normed:
            qkv, inverse = normed
            qk = qkv[:, :, : kernel.num_queries + kernel.num_keys]
            normed = [qk, inverse, *kernel.weights]
        dqkv, sums = PIECES.piece_heads_backward(
            [dq, dk, dv], [cos_TE, sin_TE], normed, kernel.provider
        )
        for place, weight in enumerate(kernel.weights):
            kernel.store.add(weight, total(sums[:, place]))
        return dqkv, None
