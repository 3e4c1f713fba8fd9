# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a pair of linear layers, the first split by columns, the second by rows.

Split: q, k, v, gate and up by output column (whole heads), o and down by input row; [out/tp, in]
       and [out, in/tp] of each stored [out, in] weight. Under sequence parallelism the residual
       stream too, along the sequence: each of `tp` ranks holds [N/tp, D] of it. Of latent
       attention `q_up` and `kv_up` by column; `q_down` and `kv_down` are whole on every rank,
       which computes them for the rows it holds (`WholeLinear`).
Sent:  nothing between the two; after the row layer one all-reduce of [N, D] forward, before the
       column layer one backward. Under sequence parallelism an all-gather before a column layer
       and a reduce-scatter after a row layer, the same in backward, plus one all-gather of the
       saved slice (the input is kept as a slice and gathered again for the weight gradient). Of
       latent attention gradients of the two narrow vectors and of the shared key are summed
       ([N, rank]), and nothing of width D but what `o` sends.
Bytes: `tensor_bytes` in `cost/bytes/sent.py`, `latent_bytes` in the same file.
Must divide: tp | heads, kv_heads, ffn (the vocabulary is padded); tp | sequence_length under
       sequence parallelism.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation
       Recomputation in Large Transformer Models", 2022; DeepSeek-V2, 2024, section 2.1.

With `overlap` rows travel in chunks, each beside a product of its own (`tensor_overlap.py`).
The backward's collective is in flight while weight gradients are computed, those of the row layer
included, which were put off until then. Biases of row layers are added once, after the sum.
Shape suffixes: N tokens, I inputs, O outputs of a layer on this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.core.choices.kernels import Kernels
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.models.precision import E4M3, E5M2, at_least_fp32
from echelon.parallel.fp8_scales import TensorScales, tensor_scales
from echelon.parallel.lora import (
    add_adapter_gradients,
    add_adapters,
    add_input_gradients,
    takes_gradients,
)
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.storage.matmul import matmul
from echelon.parallel.tensor_overlap import RowProduct, TensorOverlap, tensor_overlap
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.rows import gather_rows, scatter_sum
from echelon.parallel.transport.symmetric_memory import require_symmetric_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """Say how layers are split, how they compute, and where gradients go."""

    group: Group
    """The tensor ranks."""
    sequence_parallel: bool
    """Whether the residual stream is split, too."""
    store: GradientStore
    """What takes gradients."""
    exchanges: bool = False
    """Whether what comes next in backward sends something that weight gradients can hide."""
    pieces: PieceSizes = TRAINING_PIECES
    """The rows that plain kernels take at a time."""
    overlap: TensorOverlap | None = None
    """How rows travel in chunks beside products, if they do."""
    kernels: Kernels = field(default_factory=Kernels)
    """What is not plain."""
    fp8_block: int = 0
    """Numbers of a row that share a scale where products are of 8-bit numbers
    (`parallel/fp8_linear.py`); 0: they are not."""
    fp8_gradients: torch.dtype = E4M3
    """Format of the gradients of outputs in 8 bits."""
    scales: TensorScales | None = None
    """The scales of whole tensors in 8 bits, where there are such."""

    @property
    def scattered(self) -> bool:
        """Return whether this rank holds only a slice of the rows of the residual stream."""
        return self.sequence_parallel and self.group.size > 1


def tensor_split(
    plan: Plan, group: Group, store: GradientStore, device: torch.device, pieces: PieceSizes
) -> TensorSplit:
    """Return how the layers of a rank are split; EnvironmentProblem where its device cannot."""
    layout, precision = plan.layout, plan.mathematics.precision
    if layout.tp_overlap == "symmetric-memory" and device.type != "meta":
        require_symmetric_memory(device)
    return TensorSplit(
        group=group,
        sequence_parallel=layout.sequence_parallel,
        store=store,
        pieces=pieces,
        kernels=layout.kernels,
        fp8_block=precision.fp8_block if precision.is_fp8 else 0,
        fp8_gradients=E5M2 if precision.fp8_gradients == "e5m2" else E4M3,
        scales=tensor_scales(plan, device),
        overlap=tensor_overlap(layout.tp_overlap),
    )


class ColumnLinear(torch.autograd.Function):
    """Several linear layers that read the same input, each split by output column."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        linears: Sequence[nn.Linear],
        split: TensorSplit,
        again: bool = False,
    ) -> torch.Tensor:
        """Return the outputs side by side, [N, O]; x is [N, I], or [N/tp, I] when scattered.

        `again`: backward makes x again, whether there is a weight gradient or not.
        """
        ctx.learns = takes_gradients(linears, split.store)
        ctx.save_for_backward(*((x,) if ctx.learns or again else ()))
        ctx.linears, ctx.split = linears, split
        if split.scattered and split.overlap is not None:
            product = _column_product(linears, split.store)
            y = split.overlap.gather_product(x, product, split.group, name="column.forward")[0]
        else:
            if split.scattered:
                x, gathered = gather_rows(x, split.group, name="column.forward")
                gathered.wait()
            y = column_output(x, linears, split.store)
            add_adapters(y, x, linears, split.store)
        biases: list[torch.Tensor] = [one.bias for one in linears if one.bias is not None]
        if biases:
            y += torch.cat(biases)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx, summed over the tensor ranks; weight gradients run while it is in flight."""
        kept = ctx.saved_tensors
        split: TensorSplit = ctx.split
        dy = dy.contiguous()
        linears: Sequence[nn.Linear] = ctx.linears
        pending = Pending()
        if split.scattered and split.overlap is not None:
            product = _column_gradient(linears, split.store)
            dx = split.overlap.product_scatter(dy, product, split.group, name="column.backward")
        else:
            dx = input_gradient(dy, linears, split.store)
            add_input_gradients(dx, dy, linears, split.store)
            if split.scattered:
                dx, pending = scatter_sum(dx, split.group, name="column.backward")
        if not ctx.learns:
            if not split.scattered:
                pending = split.group.all_reduce(dx, name="column.backward", async_op=True)
                split.store.run_deferred()
        elif split.scattered:
            # Only the weight gradient needs the whole input, and nothing waits for that: the
            # gather follows the sum on the link, and the product runs in the next wait, or in W.
            work = _GatheredColumns(linears, split, dy, kept[0].detach())
            split.store.defer(work.run, work.start)
        else:
            pending = split.group.all_reduce(dx, name="column.backward", async_op=True)
            # Alone: with its place in the graph it would keep the input of the stage until W.
            alone = kept[0].detach()
            split.store.defer(lambda: _column_weights(linears, split.store, dy, alone))
            split.store.run_deferred()
        pending.wait()
        return dx, None, None, None


class RowLinear(torch.autograd.Function):
    """A linear layer split by input row: each rank gives a partial sum."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, linear: nn.Linear, split: TensorSplit, again: bool = False
    ) -> torch.Tensor:
        """Return the sum over the tensor ranks, [N, D], or this rank's rows of it.

        `again`: backward makes x again, whether there is a weight gradient or not.
        """
        ctx.learns = takes_gradients([linear], split.store)
        ctx.save_for_backward(*((x,) if ctx.learns or again else ()))
        ctx.linear, ctx.split = linear, split
        if split.scattered and split.overlap is not None:
            y = split.overlap.product_scatter(
                x, _row_product(linear.weight), split.group, name="row.forward"
            )
        else:
            y = matmul(x, linear.weight)
            add_adapters(y, x, [linear], split.store)
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
        kept = ctx.saved_tensors
        linear: nn.Linear = ctx.linear
        split: TensorSplit = ctx.split
        dy = dy.contiguous()
        if linear.bias is not None and split.store.trains(linear.bias):
            split.store.add(linear.bias, dy.sum(0, dtype=at_least_fp32(dy.dtype)))
        if split.scattered and split.overlap is not None:
            dx, whole = split.overlap.gather_product(
                dy,
                _row_product(linear.weight.t()),
                split.group,
                name="row.backward",
                keeps=True,
                meanwhile=split.store.run_deferred,
            )
            assert whole is not None, "the weight gradient needs it"
            dy = whole
        else:
            if split.scattered:
                dy, gathered = gather_rows(dy, split.group, name="row.backward")
                split.store.run_deferred()
                gathered.wait()
            dx = matmul(dy, linear.weight.t())
            add_input_gradients(dx, dy, [linear], split.store)
        if ctx.learns:
            alone = kept[0].detach()
            split.store.defer(lambda: _row_weights(linear, split.store, dy, alone))
        if split.group.size == 1 and not split.exchanges:
            split.store.run_deferred()
        return dx, None, None, None


def _row_weights(
    linear: nn.Linear, store: GradientStore, dy: torch.Tensor, x: torch.Tensor
) -> None:
    store.add_matmul([linear.weight], dy, x)
    add_adapter_gradients(dy, x, [linear], store)


def column_output(
    x: torch.Tensor,
    linears: Sequence[nn.Linear],
    store: GradientStore,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outputs of layers that read the same x, side by side (in `out`), no bias added."""
    weight = store.matrices([linear.weight for linear in linears])
    if weight is None:
        return torch.cat([matmul(x, linear.weight) for linear in linears], dim=-1, out=out)
    return matmul(x, weight, out=out)


def input_gradient(
    dy: torch.Tensor,
    linears: Sequence[nn.Linear],
    store: GradientStore,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return dx of layers that read the same x, [N, I], from their dy side by side (in `out`)."""
    weight = store.matrices([linear.weight for linear in linears])
    if weight is not None:
        return matmul(dy, weight.t(), out=out)
    parts = dy.split([linear.out_features for linear in linears], dim=-1)
    dx = torch.mm(parts[0], linears[0].weight, out=out)
    for part, linear in zip(parts[1:], linears[1:], strict=True):
        dx.addmm_(part, linear.weight)
    return dx


def _column_product(linears: Sequence[nn.Linear], store: GradientStore) -> RowProduct:
    weight = store.matrices([linear.weight for linear in linears])
    return RowProduct(
        multiply=lambda rows, out: column_output(rows, linears, store, out),
        width=sum(linear.out_features for linear in linears),
        weight_IO=None if weight is None else weight.t(),
    )


def _column_gradient(linears: Sequence[nn.Linear], store: GradientStore) -> RowProduct:
    return RowProduct(
        multiply=lambda rows, out: input_gradient(rows, linears, store, out),
        width=linears[0].in_features,
        weight_IO=store.matrices([linear.weight for linear in linears]),
    )


def _row_product(weight_OI: torch.Tensor) -> RowProduct:
    return RowProduct(
        multiply=lambda rows, out: matmul(rows, weight_OI, out=out),
        width=weight_OI.shape[0],
        weight_IO=weight_OI.t(),
    )


@dataclass(slots=True)
class _GatheredColumns:
    """The weight gradients of column layers under sequence parallelism: they need the whole x."""

    linears: Sequence[nn.Linear]
    split: TensorSplit
    dy: torch.Tensor
    x: torch.Tensor
    gathered: Pending | None = None

    def start(self) -> None:
        """Start to gather the rows of x of all tensor ranks."""
        self.x, self.gathered = gather_rows(self.x, self.split.group, name="column.backward.input")

    def run(self) -> None:
        """Compute the gradients."""
        assert self.gathered is not None, "start comes first"
        self.gathered.wait()
        _column_weights(self.linears, self.split.store, self.dy, self.x)


def _column_weights(
    linears: Sequence[nn.Linear], store: GradientStore, dy: torch.Tensor, x: torch.Tensor
) -> None:
    store.add_matmul([linear.weight for linear in linears], dy, x)
    add_adapter_gradients(dy, x, linears, store)
    add_bias_gradients(dy, linears, store)


def add_bias_gradients(
    dy: torch.Tensor, linears: Sequence[nn.Linear], store: GradientStore
) -> None:
    """Add the sums of dy, the outputs side by side, to the gradients of biases that are trained."""
    parts = dy.split([linear.out_features for linear in linears], dim=-1)
    for part, linear in zip(parts, linears, strict=True):
        if linear.bias is not None and store.trains(linear.bias):
            store.add(linear.bias, part.sum(0, dtype=at_least_fp32(dy.dtype)))


class WholeLinear(torch.autograd.Function):
    """Several linear layers without bias that read the same rows, whole on every tensor rank."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, linears: Sequence[nn.Linear], split: TensorSplit
    ) -> tuple[torch.Tensor, ...]:
        """Return the output of each, [N, O]."""
        ctx.learns = takes_gradients(linears, split.store)
        ctx.save_for_backward(*((x_NI,) if ctx.learns else ()))
        ctx.linears, ctx.split = linears, split
        ys_NO = tuple(matmul(x_NI, linear.weight) for linear in linears)
        for linear, y_NO in zip(linears, ys_NO, strict=True):
            add_adapters(y_NO, x_NI, [linear], split.store)
        return ys_NO

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx; weight gradients are put off until a collective is in flight."""
        kept = ctx.saved_tensors
        linears: Sequence[nn.Linear] = ctx.linears
        split: TensorSplit = ctx.split
        dys_NO = [dy.contiguous() for dy in dys]
        dx_NI = matmul(dys_NO[0], linears[0].weight.t())
        for linear, dy_NO in zip(linears[1:], dys_NO[1:], strict=True):
            dx_NI.addmm_(dy_NO, linear.weight)
        for linear, dy_NO in zip(linears, dys_NO, strict=True):
            add_input_gradients(dx_NI, dy_NO, [linear], split.store)
            if ctx.learns:
                x_NI = kept[0].detach()
                split.store.defer(partial(_row_weights, linear, split.store, dy_NO, x_NI))
        if split.group.size == 1:
            split.store.run_deferred()
        return dx_NI, None, None
