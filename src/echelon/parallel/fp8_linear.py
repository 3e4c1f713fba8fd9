# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel linear layers that multiply 8-bit numbers.

Split: as `parallel/tensor.py` says, whose layers these are with other products. Tiles of 8-bit
       numbers lie inside the piece of one rank, so that every layout has the same ones; scales of
       whole tensors come from steps before (`fp8_scales.py`).
Sent:  as there; but what sequence parallelism gathers are codes, 1 byte of a number and 4 of the
       scale of a tile. Sums are of the dtype of the parameters.
Bytes: `tensor_bytes` in `cost/bytes/sent.py`.
Must divide: precision.fp8_block | every width of a layer on a rank.
Source: DeepSeek-V3, 2024, section 3.3.

Each number is rounded once: the input x and the weight W for the forward product, the gradient dy
for both products of backward.

    y = Q(x) Q(W)^T     dx = Q(dy) Q(W)     dW = Q(dy)^T Q(x)

A layer keeps Q(x) for backward, 1 byte of a number; a weight gradient that waits keeps Q(dy) beside
it. The sum of dW runs over tokens, whose scales differ where they are of tiles: that product is one
of the dtype of the parameters, in which what codes stand for is exact.

Shape suffixes: N tokens, I inputs, O outputs of a layer on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.models.modules import EmptyLinear
from echelon.parallel.fp8_scales import GRADIENTS, INPUTS, WEIGHTS
from echelon.parallel.kernels.fp8 import (
    Fp8Matrix,
    multiply,
    quantised_rows,
    quantised_weight,
    quantised_whole,
    weight_gradient,
)
from echelon.parallel.tensor import TensorSplit, add_bias_gradients
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.rows import gather_rows, scatter_sum


class Fp8ColumnLinear(torch.autograd.Function):
    """Several linear layers that read the same input, each split by output column."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, linears: Sequence[nn.Linear], split: TensorSplit, again: bool
    ) -> torch.Tensor:
        """Return the outputs side by side, [N, O]; x is [N, I], or [N/tp, I] when scattered.

        Where `again`, x is made again for backward, and is kept by whoever does so.
        """
        ctx.linears, ctx.split, ctx.again = linears, split, again
        rows = _keep(ctx, x, linears)
        if split.scattered:
            gathering = _Gathering(rows, split.group, "column.forward")
            gathering.start()
            rows = gathering.wait()
        y = multiply(rows, weights_in_fp8(linears, split), x.dtype)
        biases: list[torch.Tensor] = [one.bias for one in linears if one.bias is not None]
        if biases:
            y += torch.cat(biases)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx, summed over the tensor ranks; weight gradients run while it is in flight."""
        split: TensorSplit = ctx.split
        linears: Sequence[nn.Linear] = ctx.linears
        x = _kept(ctx, linears)
        add_bias_gradients(dy, linears, split.store)
        dy_NO = gradients_in_fp8(dy, linears, split)
        dtype = dy.dtype
        del dy
        dx = multiply(dy_NO, weights_in_fp8(linears, split), dtype, transposed=True)
        if split.scattered:
            dx, pending = scatter_sum(dx, split.group, name="column.backward")
            gathering = _Gathering(x, split.group, "column.backward.input")
            split.store.defer(
                lambda: add_weight_gradients(linears, split, dy_NO, gathering.wait(), dtype),
                gathering.start,
            )
        else:
            pending = split.group.all_reduce(dx, name="column.backward", async_op=True)
            split.store.defer(partial(add_weight_gradients, linears, split, dy_NO, x, dtype))
            split.store.run_deferred()
        pending.wait()
        return dx, None, None, None


class Fp8RowLinear(torch.autograd.Function):
    """A linear layer split by input row: each rank gives a partial sum."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, linear: nn.Linear, split: TensorSplit, again: bool
    ) -> torch.Tensor:
        """Return the sum over the tensor ranks, [N, D], or this rank's rows of it."""
        ctx.linear, ctx.split, ctx.again = linear, split, again
        y = multiply(_keep(ctx, x, [linear]), weights_in_fp8([linear], split), x.dtype)
        if split.scattered:
            y, pending = scatter_sum(y, split.group, name="row.forward")
        else:
            pending = split.group.all_reduce(y, name="row.forward", async_op=True)
        pending.wait()
        if linear.bias is not None:
            y += linear.bias
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx; the weight gradient is put off until a collective is in flight."""
        linear: nn.Linear = ctx.linear
        split: TensorSplit = ctx.split
        x = _kept(ctx, [linear])
        add_bias_gradients(dy, [linear], split.store)
        dy_NO = gradients_in_fp8(dy, [linear], split)
        if split.scattered:
            gathering = _Gathering(dy_NO, split.group, "row.backward")
            gathering.start()
            split.store.run_deferred()
            dy_NO = gathering.wait()
        dx = multiply(dy_NO, weights_in_fp8([linear], split), dy.dtype, transposed=True)
        split.store.defer(partial(add_weight_gradients, [linear], split, dy_NO, x, dy.dtype))
        if split.group.size == 1 and not split.exchanges:
            split.store.run_deferred()
        return dx, None, None, None


_NARROW = ("q_down", "kv_down")
"""Layers that lead down to the narrow vectors of latent attention: `WholeLinear`'s."""


def multiply_in_fp8(decoder: nn.Module, block: int) -> None:
    """Let the layers of a whole decoder give what ranks make of their input; no gradients."""
    for name, module in decoder.named_modules():
        if isinstance(module, EmptyLinear) and name.rpartition(".")[2] not in _NARROW:
            forward: Any = partial(_forward, module, block)
            module.forward = forward


def _forward(linear: EmptyLinear, block: int, x: torch.Tensor) -> torch.Tensor:
    weight = quantised_weight(linear.weight, block)
    y = multiply(quantised_rows(x, block), weight, x.dtype)
    return y if linear.bias is None else y + linear.bias


def inputs_in_fp8(
    x_NI: torch.Tensor, linears: Sequence[nn.Linear], split: TensorSplit, *, again: bool = False
) -> Fp8Matrix:
    """Return what layers read, in 8 bits; its largest number is noted, but not `again`."""
    if split.scales is not None:
        if not again:
            split.scales.note(INPUTS, x_NI, linears)
        scale = split.scales.scale(INPUTS, linears)
        if scale is not None:
            return quantised_whole(x_NI, scale, split.pieces)
    return quantised_rows(x_NI, split.fp8_block, split.pieces)


def gradients_in_fp8(
    dy_NO: torch.Tensor, linears: Sequence[nn.Linear], split: TensorSplit
) -> Fp8Matrix:
    """Return the gradients of the outputs of layers that read the same input, in 8 bits."""
    if split.scales is not None:
        split.scales.note(GRADIENTS, dy_NO, linears)
        scale = split.scales.scale(GRADIENTS, linears)
        if scale is not None:
            return quantised_whole(dy_NO, scale, split.pieces, split.fp8_gradients)
    return quantised_rows(dy_NO, split.fp8_block, split.pieces, split.fp8_gradients)


def weights_in_fp8(linears: Sequence[nn.Linear], split: TensorSplit) -> Fp8Matrix:
    """Return the weights of layers that read the same input, side by side by output."""
    weights = [linear.weight for linear in linears]
    weight, scales = split.store.matrices(weights), split.store.scales(weights)
    if weight is not None and scales is not None:  # codes of it were gathered
        return Fp8Matrix(codes=weight, scales=scales, block=split.fp8_block, square=True)
    scale = None if split.scales is None else split.scales.scale(WEIGHTS, linears)
    if weight is not None and scale is not None:
        return quantised_whole(weight, scale, split.pieces)
    if weight is not None:
        return quantised_weight(weight, split.fp8_block, split.pieces)
    parts = [weights_in_fp8([one], split) for one in linears]
    made = parts[0].scales if scale is not None else torch.cat([one.scales for one in parts])
    return replace(parts[0], codes=torch.cat([part.codes for part in parts]), scales=made)


def add_weight_gradients(
    linears: Sequence[nn.Linear],
    split: TensorSplit,
    dy_NO: Fp8Matrix,
    x_NI: Fp8Matrix,
    dtype: torch.dtype,
) -> None:
    """Add dy^T x of what the codes stand for to the gradients of layers that read the same x."""
    parameters = [linear.weight for linear in linears]
    made = weight_gradient(dy_NO, x_NI, dtype)
    if made is None:
        split.store.add_matmul(parameters, dy_NO.numbers(dtype), x_NI.numbers(dtype))
        return
    for parameter, part in zip(parameters, made.split([len(p) for p in parameters]), strict=True):
        split.store.add(parameter, part)


def _keep(ctx: Any, x: torch.Tensor, linears: Sequence[nn.Linear]) -> Fp8Matrix:
    """Return x in 8 bits, and keep that for backward, or x where it is made again."""
    rows = inputs_in_fp8(x, linears, ctx.split)
    if ctx.again:
        ctx.save_for_backward(x)
    else:
        keep_fp8(ctx, rows)
    return rows


def _kept(ctx: Any, linears: Sequence[nn.Linear]) -> Fp8Matrix:
    """Return what `_keep` returned."""
    if not ctx.again:
        return kept_fp8(ctx, ctx.saved_tensors)
    (x,) = ctx.saved_tensors
    # By the scale of its step, as in the forward pass: the next step begins when all W are done.
    return inputs_in_fp8(x, linears, ctx.split, again=True)


def keep_fp8(ctx: Any, rows: Fp8Matrix, *others: torch.Tensor) -> None:
    """Keep rows in 8 bits for backward, and other tensors after them.

    The scale of a whole tensor is one of the step, and takes no memory of its own.
    """
    ctx.rows = replace(rows, codes=_NOTHING, scales=rows.scales if rows.is_whole else _NOTHING)
    scales = () if rows.is_whole else (rows.scales,)
    ctx.save_for_backward(*others, rows.codes, *scales)


def kept_fp8(ctx: Any, saved: Sequence[torch.Tensor]) -> Fp8Matrix:
    """Return the rows that `keep_fp8` kept, which are the last of what is saved."""
    # Alone: with their place in the graph they would keep the input of the stage until W.
    if ctx.rows.is_whole:
        return replace(ctx.rows, codes=saved[-1].detach())
    codes, scales = saved[-2:]
    return replace(ctx.rows, codes=codes.detach(), scales=scales.detach())


_NOTHING = torch.empty(0)
"""In place of what autograd keeps."""


@dataclass(slots=True)
class _Gathering:
    """Rows in 8 bits of all tensor ranks: codes in one collective, scales in the next."""

    rows: Fp8Matrix
    group: Group
    name: str
    pending: tuple[Pending, ...] = ()

    def start(self) -> None:
        """Start to gather; Gloo sends no codes, but bytes."""
        bytes_Nc, codes = gather_rows(
            self.rows.codes.view(torch.uint8), self.group, name=f"{self.name}.codes"
        )
        self.rows = replace(self.rows, codes=bytes_Nc.view(self.rows.codes.dtype))
        self.pending = (codes,)
        if self.rows.is_whole:  # every rank has that scale
            return
        scales_Nc, scales = gather_rows(self.rows.scales, self.group, name=f"{self.name}.scales")
        self.rows = replace(self.rows, scales=scales_Nc)
        self.pending = codes, scales

    def wait(self) -> Fp8Matrix:
        """Return the rows of all."""
        assert self.pending, "start comes first"
        for one in self.pending:
            one.wait()
        return self.rows
