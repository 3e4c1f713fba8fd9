# SPDX-License-Identifier: Apache-2.0
"""What the experts of a rank compute of the rows that arrive: one expert after the other.

Where one launch does it for all of them (`grouped_matmul.py`), that is used; how many rows each
expert has need not be known to the host then.

The gate of a row weights the inner activation, so what comes out is weighted already: nothing of
the outputs need be kept for the gradient of the gates. Where experts have biases, that of the
output is weighted, too: y = W (g a) + g b, so that dg has dy . b beside dy . W a, and db is the sum
of g dy. Of an expert in pieces each tensor rank has the whole b, and the first one alone adds it;
rows and their gradients are alike on all of them, and so is the gradient of b. Weight gradients are
put off until a collective is in flight, and written straight into the buckets. An expert without
rows has a gradient of zero.

In products of 8-bit numbers (`parallel/fp8_linear.py`) rows are rounded when they have arrived,
inner activations when they are weighted. Kept for backward are the rows in 8 bits, and gate and up.

Shape suffixes: R rows of all experts here, F inner width (of one piece), D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from echelon.models.moe import Expert
from echelon.models.precision import at_least_fp32
from echelon.parallel.expert.grouped_matmul import GroupedExperts, RowCounts
from echelon.parallel.expert.inner_activation import InnerActivation
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
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.storage.matmul import matmul
from echelon.parallel.tensor import TensorSplit, input_gradient


class ExpertFeedForward(torch.autograd.Function):
    """The SwiGLU of each expert for its rows, weighted."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: torch.Tensor,
        gates_R: torch.Tensor,
        experts: Sequence[Expert],
        counts: RowCounts,
        split: TensorSplit,
    ) -> torch.Tensor:
        """Return y_RD for rows that lie side by side by expert, `counts` of each."""
        store, activation = split.store, InnerActivation.of(experts[0].kind, split)
        ctx.experts, ctx.counts, ctx.split = experts, counts, split
        ctx.grouped = GroupedExperts.from_rows(rows_RD, experts, counts, split)
        if ctx.grouped is not None:
            y_RD, gate_up = ctx.grouped.forward(rows_RD, gates_R)
            ctx.save_for_backward(rows_RD, gates_R, gate_up)
            return y_RD
        assert not isinstance(counts, torch.Tensor), "one after the other takes numbers"
        y_RD = torch.empty_like(rows_RD)
        inners: list[torch.Tensor] = []
        parts = zip(experts, _split(counts, rows_RD, gates_R, y_RD), strict=True)
        for expert, (x, gates, y) in parts:
            gate_up = _project(x, expert, store)
            inners.append(gate_up)
            matmul(activation.forward(gate_up, gates), expert.down.weight, out=y)
            if _adds_bias(expert, split):
                for part in row_chunks(y, split.pieces):
                    y[part] += expert.weighted_bias(gates[part], y.dtype)
        ctx.save_for_backward(rows_RD, gates_R, *inners)
        return y_RD

    @staticmethod
    def backward(ctx: Any, dy_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of rows and gates; those of the weights are put off."""
        rows_RD, gates_R, *inners = (one.detach() for one in ctx.saved_tensors)
        split: TensorSplit = ctx.split
        store, alone = split.store, split.group.size == 1 and not split.exchanges
        dy_RD = dy_RD.contiguous()
        if ctx.grouped is not None:
            saved = (rows_RD, gates_R, *inners)
            return (*ctx.grouped.backward(dy_RD, saved, store), None, None, None)
        activation = InnerActivation.of(ctx.experts[0].kind, split)
        dx_RD, dgates_R = torch.empty_like(rows_RD), torch.empty_like(gates_R)
        pieces = _split(ctx.counts, rows_RD, gates_R, dy_RD, dx_RD, dgates_R)
        for expert, gate_up, parts in zip(ctx.experts, inners, pieces, strict=True):
            x, gates, dy, dx, dgates = parts
            dinner = matmul(dy, expert.down.weight.t())
            inner, dgate_up = activation.backward(dinner, gate_up, gates, dgates)
            if expert.kind.bias:
                _bias_gradients(expert, (dy, gates, dgates), dgate_up, split)
            input_gradient(dgate_up, [expert.gate, expert.up], store, out=dx)
            store.defer(partial(store.add_matmul, [expert.down.weight], dy, inner))
            pair = [expert.gate.weight, expert.up.weight]
            store.defer(partial(store.add_matmul, pair, dgate_up, x))
            if alone:
                store.run_deferred()
        return dx_RD, dgates_R, None, None, None


def _split(counts: Sequence[int], *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split(list(counts)) for tensor in tensors), strict=True))


def _project(x: torch.Tensor, expert: Expert, store: GradientStore) -> torch.Tensor:
    weight = store.matrices([expert.gate.weight, expert.up.weight])
    if weight is None:
        y = torch.cat([matmul(x, expert.gate.weight), matmul(x, expert.up.weight)], dim=-1)
    else:
        y = matmul(x, weight)
    if expert.kind.bias:
        y += torch.cat([expert.gate.bias, expert.up.bias])
    return y


def _adds_bias(expert: Expert, split: TensorSplit) -> bool:
    """Return whether the bias of the output is added here: by one of those that have a piece."""
    return expert.kind.bias and (expert.pieces == 1 or split.group.index == 0)


def _bias_gradients(
    expert: Expert,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dgate_up: torch.Tensor,
    split: TensorSplit,
) -> None:
    """Put off the gradients of the biases; add to those of the gates.

    `outputs` are the gradient of the output, the gates, and their gradients, which get more here.
    """
    dy, gates, dgates = outputs
    store, wide = split.store, at_least_fp32(dy.dtype)
    bias = expert.down.bias.to(wide)
    total = torch.zeros_like(bias)
    for rows in row_chunks(dy, split.pieces):
        dy_wide = dy[rows].to(wide)
        total.addmv_(dy_wide.t(), gates[rows].to(wide))
        if _adds_bias(expert, split):
            dgates[rows] += (dy_wide @ bias).to(dgates.dtype)
    gradients = (total, *dgate_up.sum(0, dtype=wide).chunk(2))
    linears = (expert.down, expert.gate, expert.up)
    for linear, gradient in zip(linears, gradients, strict=True):
        store.defer(partial(store.add, linear.bias, gradient))


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
