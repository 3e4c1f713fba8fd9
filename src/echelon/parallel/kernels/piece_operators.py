# SPDX-License-Identifier: Apache-2.0
"""The pieces between products: operators of PyTorch, one kernel each, and their gradients.

On a GPU an operator is a kernel in Triton (`norm_swiglu_triton.py` and its neighbours), or what
PyTorch's compiler makes of the formula (`piece_formulas.py`); on a CPU the latter, or the formula
itself, operation by operation: so a plan with kernels for GPUs is proven where there are none. On
tensors without elements the formula says what comes out, and a rehearsal counts one kernel, with
all that it reads and writes.

An operator is opaque to the compiler and to autograd: gradients are written by hand around it,
those of weights go to the GradientStore, and nothing else about a rank changes. Which way is taken
is an argument of each, `provider`: "triton" or "compiled".

The residual stream and its norm come out of one kernel at the head of a branch (`Branch`): forward
adds what the branch before gave, backward adds what comes around this one. What is kept for
backward is what the plain kernels keep (`fused.py`): the stream, a number for each row, gate and
up, the projections of attention.

Shape suffixes: N tokens, R rows, D hidden, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import nn

from echelon.core.choices.kernels import KernelProvider
from echelon.parallel.kernels import piece_formulas
from echelon.parallel.kernels.operators import define_operator
from echelon.parallel.recompute import Remade
from echelon.parallel.storage.gradients import GradientStore

_ROOM = "echelon.parallel.kernels"
_IN_TRITON = {
    **dict.fromkeys(("rotate", "heads", "heads_backward"), f"{_ROOM}.rotary_triton"),
    **dict.fromkeys(("norm", "add_norm", "norm_backward"), f"{_ROOM}.norm_swiglu_triton"),
    **dict.fromkeys(("swiglu", "weighted_swiglu"), f"{_ROOM}.norm_swiglu_triton"),
    **dict.fromkeys(("swiglu_backward", "weighted_swiglu_backward"), f"{_ROOM}.norm_swiglu_triton"),
}
"""The file of each kernel in Triton; the loss has its own operators (`cross_entropy.py`)."""

_SUMS = frozenset({"norm_backward", "heads_backward"})
"""Formulas with sums over rows: a compiler makes one sum of them, Triton's kernels partial ones."""


@cache
def compiled(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a formula as PyTorch's compiler makes it; casts round as they do uncompiled.

    The compiler keeps a few versions of a function, for kinds of shapes: each dtype is a function
    of its own, so that there are enough of them.
    """
    formula = getattr(piece_formulas, name)
    code = formula.__code__.replace(co_name=f"{name}_{str(dtype).rpartition('.')[2]}")
    own = FunctionType(code, formula.__globals__)
    return torch.compile(own, fullgraph=True, options={"emulate_precision_casts": True})


def _computed(name: str, *args: Any) -> Any:
    """Result of a kernel or formula; the last of `args` is the provider, the rest is its own."""
    *given, provider = args
    first: torch.Tensor = given[0][0] if isinstance(given[0], tuple) else given[0]
    if provider == "triton" and first.is_cuda:
        return getattr(import_module(_IN_TRITON[name]), name)(*given)
    whole = {"whole": provider == "compiled"} if name in _SUMS else {}
    # A compiler makes other kernels for one row, or none; experts may have as few.
    if provider == "compiled" and not first.is_meta and first.shape[0] > 1:
        return compiled(name, first.dtype)(*given, **whole)
    return getattr(piece_formulas, name)(*given, **whole)


def _heads(
    qk: torch.Tensor,
    num_queries: int,
    tables: list[torch.Tensor],
    weights: list[torch.Tensor],
    eps: float,
    provider: str,
) -> Any:
    return _computed("heads", qk, num_queries, tuple(tables), tuple(weights) or None, eps, provider)


def _heads_backward(
    gradients: list[torch.Tensor],
    tables: list[torch.Tensor],
    normed: list[torch.Tensor],
    provider: str,
) -> Any:
    args = (tuple(gradients), tuple(tables), tuple(normed) or None)
    return _computed("heads_backward", *args, provider)


def _swiglu(gate_up: torch.Tensor, weights: torch.Tensor | None, provider: str) -> Any:
    if weights is None:
        return _computed("swiglu", gate_up, provider)
    return _computed("weighted_swiglu", gate_up, weights, provider)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "piece_norm(Tensor x, Tensor weight, float eps, str provider) -> (Tensor, Tensor)": partial(
        _computed, "norm"
    ),
    "piece_add_norm(Tensor x, Tensor y, Tensor weight, float eps, str provider)"
    " -> (Tensor, Tensor, Tensor)": partial(_computed, "add_norm"),
    "piece_norm_backward(Tensor dy, Tensor x, Tensor inverse, Tensor weight, Tensor? around,"
    " str provider) -> (Tensor, Tensor)": partial(_computed, "norm_backward"),
    "piece_rotate(Tensor x, Tensor cos, Tensor sin, int direction, str provider)"
    " -> Tensor": partial(_computed, "rotate"),
    "piece_heads(Tensor qk, int num_queries, Tensor[] tables, Tensor[] weights, float eps,"
    " str provider) -> (Tensor, Tensor, Tensor)": _heads,
    "piece_heads_backward(Tensor[] gradients, Tensor[] tables, Tensor[] normed, str provider)"
    " -> (Tensor, Tensor)": _heads_backward,
    "piece_swiglu(Tensor gate_up, Tensor? weights, str provider) -> Tensor": _swiglu,
    "piece_swiglu_backward(Tensor dy, Tensor gate_up, str provider) -> Tensor": partial(
        _computed, "swiglu_backward"
    ),
    "piece_weighted_swiglu_backward(Tensor dy, Tensor gate_up, Tensor weights, str provider)"
    " -> (Tensor, Tensor, Tensor)": partial(_computed, "weighted_swiglu_backward"),
}
"""Each operator's schema, and the function that computes it anywhere."""

for _schema, _run in _OPERATORS.items():
    define_operator(_schema, cpu=_run, meta=_run)

PIECES: Any = torch.ops.echelon
"""Where the operators are found, by the names above."""


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
