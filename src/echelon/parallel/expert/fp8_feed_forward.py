# SPDX-License-Identifier: Apache-2.0
"""What the experts of a rank compute of the rows that arrive, in products of 8-bit numbers.

As in `feed_forward.py`, one expert after the other, with the products of `parallel/fp8_linear.py`.
Rows are rounded when they have arrived, inner activations when they are weighted. Kept for backward
are the rows in 8 bits, and gate and up.

Shape suffixes: R rows of all experts here, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from echelon.models.moe import Expert
from echelon.parallel.fp8_linear import (
    add_weight_gradients,
    gradients_in_fp8,
    inputs_in_fp8,
    keep_fp8,
    kept_fp8,
    weights_in_fp8,
)
from echelon.parallel.kernels.fp8 import multiply
from echelon.parallel.kernels.fused import weighted_swiglu, weighted_swiglu_backward
from echelon.parallel.tensor import TensorSplit


class Fp8ExpertFeedForward(torch.autograd.Function):
    """The SwiGLU of each expert for its rows, weighted."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: torch.Tensor,
        gates_R: torch.Tensor,
        experts: Sequence[Expert],
        counts: Sequence[int],
        split: TensorSplit,
    ) -> torch.Tensor:
        """Return y_RD for rows that lie side by side by expert, `counts` of each."""
        ctx.experts, ctx.counts, ctx.split = experts, counts, split
        rows = inputs_in_fp8(rows_RD, [experts[0].gate], split)
        y_RD, dtype = torch.empty_like(rows_RD), rows_RD.dtype
        inners: list[torch.Tensor] = []
        for expert, part in zip(experts, _parts(counts), strict=True):
            pair = weights_in_fp8([expert.gate, expert.up], split)
            gate_up = multiply(rows.rows(part), pair, dtype)
            inners.append(gate_up)
            weighted = weighted_swiglu(gate_up, gates_R[part], split.pieces)
            inner = inputs_in_fp8(weighted, [expert.down], split)
            multiply(inner, weights_in_fp8([expert.down], split), dtype, out=y_RD[part])
        keep_fp8(ctx, rows, gates_R, *inners)
        return y_RD

    @staticmethod
    def backward(ctx: Any, dy_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of rows and gates; those of the weights are put off."""
        saved: Sequence[torch.Tensor] = ctx.saved_tensors
        gates_R, *inners = (one.detach() for one in saved[: 1 + len(ctx.counts)])
        split: TensorSplit = ctx.split
        store, dtype = split.store, dy_RD.dtype
        alone = split.group.size == 1 and not split.exchanges
        rows = kept_fp8(ctx, saved)
        dy = gradients_in_fp8(dy_RD, [ctx.experts[0].down], split)
        dx_RD, dgates_R = torch.empty_like(dy_RD), torch.empty_like(gates_R)
        for expert, gate_up, part in zip(ctx.experts, inners, _parts(ctx.counts), strict=True):
            down, pair = [expert.down], [expert.gate, expert.up]
            dinner = multiply(dy.rows(part), weights_in_fp8(down, split), dtype, transposed=True)
            inner, dgate_up = weighted_swiglu_backward(
                dinner, gate_up, gates_R[part], dgates_R[part], split.pieces
            )
            inner = inputs_in_fp8(inner, down, split, again=True)
            dgate_up = gradients_in_fp8(dgate_up, pair, split)
            made = weights_in_fp8(pair, split)
            multiply(dgate_up, made, dtype, transposed=True, out=dx_RD[part])
            add = partial(add_weight_gradients, split=split, dtype=dtype)
            store.defer(partial(add, down, dy_NO=dy.rows(part), x_NI=inner))
            store.defer(partial(add, pair, dy_NO=dgate_up, x_NI=rows.rows(part)))
            if alone:
                store.run_deferred()
        return dx_RD, dgates_R, None, None, None


def _parts(counts: Sequence[int]) -> Iterator[slice]:
    """Yield the rows of each expert."""
    for start, end in pairwise(accumulate(counts, initial=0)):
        yield slice(start, end)
