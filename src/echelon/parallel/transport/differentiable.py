# SPDX-License-Identifier: Apache-2.0
"""Collectives with a gradient: each one's backward is its transpose, another collective.

    all-reduce      <->  all-reduce
    all-gather      <->  reduce-scatter
    all-to-all      <->  all-to-all, of the sizes the other way round
    broadcast       <->  reduce, a sum that one rank gets

What a group computes is one function of all its members' tensors, whose loss is the sum of all
members' losses: so what a rank's gradient lacks comes from the others, and is summed. Backward is
differentiable too. All members must call the same functions in the same order, backward included.

Shape suffixes: N rows of the whole, n = N / group size rows of one rank, D all other dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.rows import MoveRows, RowsWay, gather_rows, scatter_sum


def moved(x: torch.Tensor, group: Group, way: RowsWay) -> torch.Tensor:
    """Return `x` after a motion, through which gradients go the other way.

    The events of its collectives have the same names in both directions.
    """
    return cast(torch.Tensor, MoveRows.apply(x, group, "", way))


def _summed(x: torch.Tensor, group: Group, _: str) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, name="all_reduce").wait()
    return total


def _gathered(x_nD: torch.Tensor, group: Group, _: str) -> torch.Tensor:
    whole_ND, pending = gather_rows(x_nD, group, name="all_gather")
    pending.wait()
    return whole_ND


def _scattered(x_ND: torch.Tensor, group: Group, _: str) -> torch.Tensor:
    slice_nD, pending = scatter_sum(x_ND.contiguous(), group, name="reduce_scatter")
    pending.wait()
    return slice_nD


def exchange_rows(send_rows: Sequence[int], receive_rows: Sequence[int]) -> RowsWay:
    """Return the all-to-all that sends so many rows to each member, and gets so many from each."""

    def there(x: torch.Tensor, group: Group, _: str) -> torch.Tensor:
        return _exchanged(x, group, send_rows, receive_rows)

    def back(x: torch.Tensor, group: Group, _: str) -> torch.Tensor:
        return _exchanged(x, group, receive_rows, send_rows)

    return there, back


def _exchanged(
    x: torch.Tensor, group: Group, send_rows: Sequence[int], receive_rows: Sequence[int]
) -> torch.Tensor:
    y = x.new_empty((sum(receive_rows), *x.shape[1:]))
    leaving = dict(enumerate(x.contiguous().split(list(send_rows))))
    coming = dict(enumerate(y.split(list(receive_rows))))
    coming.pop(group.index).copy_(leaving.pop(group.index))
    sends = {place: rows.view(-1) for place, rows in leaving.items() if rows.numel()}
    receives = {place: rows.view(-1) for place, rows in coming.items() if rows.numel()}
    group.exchange(sends, receives, name="all_to_all").wait()
    return y


def from_source(source: int) -> RowsWay:
    """Return the broadcast of the tensor of member `source`; backward is a sum that it gets."""

    def there(x: torch.Tensor, group: Group, _: str) -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        others = [place for place in range(group.size) if place != source]
        if group.index == source:
            group.exchange({place: y.view(-1) for place in others}, {}, name="broadcast").wait()
        else:
            group.exchange({}, {source: y.view(-1)}, name="broadcast").wait()
        return y

    def back(x: torch.Tensor, group: Group, _: str) -> torch.Tensor:
        own = x.contiguous()
        if group.index != source:
            group.exchange({source: own.view(-1)}, {}, name="reduce").wait()
            return torch.zeros_like(own)
        parts = {
            place: own.new_empty(own.numel()) for place in range(group.size) if place != source
        }
        group.exchange({}, parts, name="reduce").wait()
        total = own.clone()
        for part in parts.values():
            total += part.view_as(own)
        return total

    return there, back


ALL_REDUCE: RowsWay = (_summed, _summed)
"""A sum that all members get."""
ALL_GATHER: RowsWay = (_gathered, _scattered)
"""The rows of all members, one after the other."""
REDUCE_SCATTER: RowsWay = (_scattered, _gathered)
"""Each member's rows of a sum."""
