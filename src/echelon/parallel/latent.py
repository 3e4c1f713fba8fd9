"""Latent attention over tensor ranks: heads are split, the narrow vectors they come out of are not.

Split: `q_up` and `kv_up` by output column, `o` by input row (whole heads), as in `tensor.py`;
       `q_down` and `kv_down` are whole on every rank, which computes them for the rows it holds.
Sent:  in backward, gradients of the two narrow vectors and of the shared key are summed over the
       ranks (all-reduce of [N, rank]); nothing of width D but what `o` sends. Under sequence
       parallelism narrow rows are gathered, and their gradients scattered, in place of wide ones.
Bytes: `cost.latent.latent_bytes`.
Must divide: tp | heads.
Source: DeepSeek-V2, 2024, section 2.1; the split is Megatron-core's.

Shape suffixes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.parallel.products import product
from echelon.parallel.tensor import TensorSplit


class WholeLinear(torch.autograd.Function):
    """Several linear layers without bias that read the same rows, whole on every tensor rank."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, linears: Sequence[nn.Linear], split: TensorSplit
    ) -> tuple[torch.Tensor, ...]:
        """Return the output of each, [N, O]."""
        ctx.save_for_backward(x_NI)
        ctx.linears, ctx.split = linears, split
        return tuple(product(x_NI, linear.weight) for linear in linears)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx; weight gradients are put off until a collective is in flight."""
        x_NI = ctx.saved_tensors[0].detach()
        linears: Sequence[nn.Linear] = ctx.linears
        split: TensorSplit = ctx.split
        dys_NO = [dy.contiguous() for dy in dys]
        dx_NI = product(dys_NO[0], linears[0].weight.t())
        for linear, dy_NO in zip(linears[1:], dys_NO[1:], strict=True):
            dx_NI.addmm_(dy_NO, linear.weight)
        for linear, dy_NO in zip(linears, dys_NO, strict=True):
            split.store.defer(partial(split.store.add_product, [linear.weight], dy_NO, x_NI))
        if split.group.size == 1:
            split.store.run_deferred()
        return dx_NI, None, None
