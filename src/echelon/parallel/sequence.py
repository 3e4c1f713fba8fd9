"""Sequence parallelism inside a tensor-parallel group.

Split: the residual stream along the sequence; each of `tp` ranks holds [N/tp, D] of it.
Sent:  all-gather before a column-parallel layer and reduce-scatter after a row-parallel one,
       in place of one all-reduce; the same in backward, plus one all-gather of the saved slice
       (the input is kept as a slice and gathered again for the weight gradient).
Bytes: `cost.bytes_sent.tensor_bytes`.
Must divide: tp | sequence_length.
Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

Rows are sequence first (token (t, b) is row t * B + b), so a slice is contiguous and the gathered
tensor needs no reordering. Shape suffixes: N tokens, D hidden.
"""

from __future__ import annotations

import torch

from echelon.parallel.collectives import Group, Pending


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
