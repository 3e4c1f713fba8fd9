"""What the experts of a rank compute of the rows that arrive: one expert after the other.

Where one launch does it for all of them (`grouped_matmul.py`), that is used; how many rows each
expert has need not be known to the host then.

The gate of a row weights the inner activation, so what comes out is weighted already: nothing of
the outputs need be kept for the gradient of the gates. Weight gradients are put off until a
collective is in flight, and written straight into the buckets. An expert without rows has a
gradient of zero.

Shape suffixes: R rows of all experts here, F inner width (of one piece), D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from echelon.models.moe import Expert
from echelon.parallel.expert.grouped_matmul import GroupedExperts, RowCounts
from echelon.parallel.gradients import GradientStore
from echelon.parallel.kernels.fused import weighted_swiglu, weighted_swiglu_backward
from echelon.parallel.kernels.matmul import matmul
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
        store, provider = split.store, split.kernels.of("swiglu")
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
            inner = weighted_swiglu(gate_up, gates, split.pieces, provider=provider)
            matmul(inner, expert.down.weight, out=y)
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
            dinner = matmul(dy, expert.down.weight.t())
            inner, dgate_up = weighted_swiglu_backward(
                *(dinner, gate_up, gates, dgates, split.pieces),
                provider=split.kernels.of("swiglu"),
            )
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
        return torch.cat([matmul(x, expert.gate.weight), matmul(x, expert.up.weight)], dim=-1)
    return matmul(x, weight)
