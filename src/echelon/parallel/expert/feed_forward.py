"""What the experts of a rank compute of the rows that arrive: one expert after the other.

Where one launch does it for all of them (`grouped.py`), that is used.

The gate of a row weights the inner activation, so what comes out is weighted already: nothing of
the outputs need be kept for the gradient of the gates. Weight gradients are put off until a
collective is in flight, and written straight into the buckets. An expert without rows has a
gradient of zero.

Shape suffixes: R rows of all experts here, F inner width (of one piece), D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from echelon.models.moe import Expert
from echelon.parallel.expert.gated import gated, gated_backward
from echelon.parallel.expert.grouped import Grouped
from echelon.parallel.gradients import GradientStore
from echelon.parallel.products import product
from echelon.parallel.tensor import TensorSplit


class FeedForward(torch.autograd.Function):
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
        store = split.store
        ctx.experts, ctx.counts, ctx.split = experts, counts, split
        ctx.grouped = Grouped.of(rows_RD, experts, counts, store)
        if ctx.grouped is not None:
            y_RD, gate_up = ctx.grouped.forward(rows_RD, gates_R)
            ctx.save_for_backward(rows_RD, gates_R, gate_up)
            return y_RD
        y_RD = torch.empty_like(rows_RD)
        inners: list[torch.Tensor] = []
        parts = zip(experts, _split(counts, rows_RD, gates_R, y_RD), strict=True)
        for expert, (x, gates, y) in parts:
            gate_up = _project(x, expert, store)
            inners.append(gate_up)
            product(gated(gate_up, gates), expert.down.weight, out=y)
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
        dx_RD, dgates_R = torch.empty_like(rows_RD), torch.empty_like(gates_R)
        pieces = _split(ctx.counts, rows_RD, gates_R, dy_RD, dx_RD, dgates_R)
        for expert, gate_up, parts in zip(ctx.experts, inners, pieces, strict=True):
            x, gates, dy, dx, dgates = parts
            dinner = product(dy, expert.down.weight.t())
            inner, dgate_up = gated_backward(dinner, gate_up, gates, dgates)
            _pull(dx, dgate_up, expert, store)
            _defer_weights(store, expert, (x, dgate_up), (inner, dy))
            if alone:
                store.run_deferred()
        return dx_RD, dgates_R, None, None, None


def _split(counts: Sequence[int], *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split(list(counts)) for tensor in tensors), strict=True))


def _project(x: torch.Tensor, expert: Expert, store: GradientStore) -> torch.Tensor:
    weight = store.matrices([expert.gate.weight, expert.up.weight])
    if weight is None:
        return torch.cat([product(x, expert.gate.weight), product(x, expert.up.weight)], dim=-1)
    return product(x, weight)


def _pull(dx: torch.Tensor, dgate_up: torch.Tensor, expert: Expert, store: GradientStore) -> None:
    weight = store.matrices([expert.gate.weight, expert.up.weight])
    if weight is not None:
        product(dgate_up, weight.t(), out=dx)
        return
    dgate, dup = dgate_up.chunk(2, dim=-1)
    torch.mm(dgate, expert.gate.weight, out=dx)
    dx.addmm_(dup, expert.up.weight)


def _defer_weights(
    store: GradientStore,
    expert: Expert,
    into: tuple[torch.Tensor, torch.Tensor],
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    (x, dgate_up), (inner, dy) = into, out
    store.defer(lambda: store.add_product([expert.down.weight], dy, inner))
    store.defer(lambda: store.add_product([expert.gate.weight, expert.up.weight], dgate_up, x))
