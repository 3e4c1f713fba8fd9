# SPDX-License-Identifier: Apache-2.0
"""Rows of a tensor gathered, scattered and summed over a group, with the gradient sent back.

Each way of `MoveRows` is one collective forward and its transpose backward. Rows are dim 0, equally
many on each rank, in the order of the group; rows of the stream are sequence first (token (t, b) is
row t * B + b), so a slice is contiguous and what is gathered needs no reordering. In a group of one
nothing is sent and nothing changes.

Shape suffixes: N rows of the whole, n = N / group size rows of one rank, D all other dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.parallel.transport.collectives import Group, Pending


def gather_rows(slice_ND: torch.Tensor, group: Group, *, name: str) -> tuple[torch.Tensor, Pending]:
    """Start to gather the slices of all tensor ranks; the result is whole after `wait`."""
    slice_ND = slice_ND.contiguous()
    whole_ND = slice_ND.new_empty((slice_ND.shape[0] * group.size, *slice_ND.shape[1:]))
    return whole_ND, group.all_gather(whole_ND, slice_ND, name=name, async_op=True)


def scatter_sum(
    partial_ND: torch.Tensor, group: Group, *, name: str
) -> tuple[torch.Tensor, Pending]:
    """Start to sum partial results over the tensor ranks, each keeping its slice of rows."""
    rows = partial_ND.shape[0] // group.size
    slice_ND = partial_ND.new_empty((rows, *partial_ND.shape[1:]))
    return slice_ND, group.reduce_scatter(slice_ND, partial_ND, name=name, async_op=True)


def own_rows(num_rows: int, group: Group) -> slice:
    """Return which of `num_rows` rows of the whole this tensor rank holds."""
    rows = num_rows // group.size
    return slice(group.index * rows, (group.index + 1) * rows)


def gathered_rows(x_nD: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    """Return the slices of all tensor ranks, in the order of the group."""
    if group.size == 1:
        return x_nD.view_as(x_nD)
    whole_ND, pending = gather_rows(x_nD, group, name=name)
    pending.wait()
    return whole_ND


def _scattered(x_ND: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    if group.size == 1:
        return x_ND.view_as(x_ND)
    slice_nD, pending = scatter_sum(x_ND.contiguous(), group, name=name)
    pending.wait()
    return slice_nD


def _summed(x_ND: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    if group.size == 1:
        return x_ND.view_as(x_ND)
    # Summed in place, so in memory that nobody else reads.
    total_ND = x_ND.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total_ND, name=name).wait()
    return total_ND


def _own(x_ND: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    return x_ND[own_rows(x_ND.shape[0], group)]


def _alike(x_ND: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    return x_ND.view_as(x_ND)


RowsMotion = Callable[[torch.Tensor, Group, str], torch.Tensor]
"""Rows, a group and the name of the event -> rows."""

RowsWay = tuple[RowsMotion, RowsMotion]
"""A motion and its transpose."""

GATHER_ROWS = (gathered_rows, _scattered)
"""all-gather; backward reduce-scatter: each rank uses all rows in its own way."""
SCATTER_ROWS = (_scattered, gathered_rows)
"""reduce-scatter; backward all-gather: each rank gives a part of a sum, and gets its rows of it."""
SUM_GRADIENT = (_alike, _summed)
"""Nothing; backward all-reduce: all have the same rows, and use them differently."""
SUM_ROWS = (_summed, _alike)
"""all-reduce; backward nothing: each gives a part, and all use the sum alike."""
OWN_ROWS = (_own, gathered_rows)
"""This rank's rows; backward all-gather: all have the same rows, and each uses its own."""
WHOLE_ROWS = (gathered_rows, _own)
"""all-gather; backward this rank's rows: all use all rows alike."""


class MoveRows(torch.autograd.Function):
    """Move rows by one motion forward, and their gradient by its transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, name: str, way: RowsWay) -> torch.Tensor:
        """Return the rows after the motion."""
        ctx.group, ctx.name, ctx.way = group, name, way
        return way[0](x, group, f"{name}.forward")

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient after the motion back."""
        if torch.is_grad_enabled():  # this backward is itself differentiated
            dx = MoveRows.apply(dy, ctx.group, ctx.name, ctx.way[::-1])
        else:
            dx = ctx.way[1](dy, ctx.group, f"{ctx.name}.backward")
        return dx, None, None, None
