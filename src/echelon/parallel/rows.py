"""Rows of a tensor gathered, scattered and summed over a group, with the gradient sent back.

Each is one collective forward and its transpose backward, as autograd functions that any layer can
be made of. Rows are dim 0, equally many on each rank, in the order of the group. In a group of one
nothing is sent and nothing changes.

    forward                          backward, of the gradient
    GatherRows   all-gather          reduce-scatter    each rank uses all rows in its own way
    ScatterRows  reduce-scatter      all-gather        each rank gives a part of a sum
    SumGradient  nothing             all-reduce        all have the same rows, use them differently
    SumRows      all-reduce          nothing           each gives a part, all use the sum alike
    OwnRows      own rows            all-gather        all have the same rows, each uses its own
    WholeRows    all-gather          own rows          all use all rows alike

Shape suffixes: N rows of the whole, n = N / group size rows of one rank, D all other dims.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.parallel.collectives import Group
from echelon.parallel.sequence import gather_rows, own_rows, scatter_sum

_Gradients = tuple[torch.Tensor | None, ...]


class GatherRows(torch.autograd.Function):
    """Give every rank the rows of all; what each makes of them is summed in backward."""

    @staticmethod
    def forward(ctx: Any, x_nD: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        """Return x_ND."""
        ctx.group, ctx.name = group, name
        return _gathered(x_nD, group, f"{name}.forward")

    @staticmethod
    def backward(ctx: Any, dy_ND: torch.Tensor) -> _Gradients:
        """Return the gradient of this rank's rows, summed over the group."""
        return _scattered(dy_ND, ctx.group, f"{ctx.name}.backward"), None, None


class ScatterRows(torch.autograd.Function):
    """Sum the parts of all ranks and give each its rows of the sum."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        """Return y_nD."""
        ctx.group, ctx.name = group, name
        return _scattered(x_ND, group, f"{name}.forward")

    @staticmethod
    def backward(ctx: Any, dy_nD: torch.Tensor) -> _Gradients:
        """Return the gradient of the whole sum, which is that of each part."""
        return _gathered(dy_nD, ctx.group, f"{ctx.name}.backward"), None, None


class SumGradient(torch.autograd.Function):
    """Pass on what all ranks have alike; the gradients of their different uses are summed."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        """Return x."""
        ctx.group, ctx.name = group, name
        return x_ND.view_as(x_ND)

    @staticmethod
    def backward(ctx: Any, dy_ND: torch.Tensor) -> _Gradients:
        """Return the sum of the gradients."""
        return _summed(dy_ND, ctx.group, f"{ctx.name}.backward"), None, None


class SumRows(torch.autograd.Function):
    """Sum the parts of all ranks; all go on with the sum alike."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        """Return the sum."""
        return _summed(x_ND, group, f"{name}.forward")

    @staticmethod
    def backward(ctx: Any, dy_ND: torch.Tensor) -> _Gradients:
        """Return the gradient of the sum, which is that of each part."""
        return dy_ND, None, None


class OwnRows(torch.autograd.Function):
    """Take this rank's rows of what all ranks have alike."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        """Return x_nD."""
        ctx.group, ctx.name = group, name
        return x_ND[own_rows(x_ND.shape[0], group)]

    @staticmethod
    def backward(ctx: Any, dy_nD: torch.Tensor) -> _Gradients:
        """Return the gradient of all rows, the same on every rank."""
        return _gathered(dy_nD, ctx.group, f"{ctx.name}.backward"), None, None


class WholeRows(torch.autograd.Function):
    """Give every rank the rows of all, to go on with alike."""

    @staticmethod
    def forward(ctx: Any, x_nD: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        """Return x_ND."""
        ctx.group = group
        return _gathered(x_nD, group, f"{name}.forward")

    @staticmethod
    def backward(ctx: Any, dy_ND: torch.Tensor) -> _Gradients:
        """Return this rank's rows of the gradient, which every rank has whole."""
        return dy_ND[own_rows(dy_ND.shape[0], ctx.group)], None, None


def _gathered(x_nD: torch.Tensor, group: Group, name: str) -> torch.Tensor:
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
