"""Many boxes of attention in one call: documents of any lengths, of all sequences of a batch.

Boxes that a kernel is asked for with the same window become the segments of one call: rows that lie
side by side are handed on as they are, others are copied there and their results back. No row and
no key is in two segments of a call, so nothing is added up twice in one place.

Shape suffixes: T queries or keys, B sequences, H heads, hd head_dim, R rows of all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch

from echelon.layout.attention_boxes import FULL, AttentionTile
from echelon.models.attention.flash import FlashArguments, FlashAttention, starts_of, window_of
from echelon.models.attention.interface import AttentionGradients, SavedAttention
from echelon.models.attention.online_softmax import OnlineSoftmax
from echelon.models.batch import start_copy

Span = tuple[int, int, int]
"""Rows of one sequence: its place in the batch, the first row, and the end."""


@dataclass(slots=True)
class PackedCall:
    """Collect the segments of one call, in the order of sequences and rows.

    A side without a bound fits each bound that is no nearer than `reach`, the farthest key there.
    """

    window: tuple[int, int]
    reach: tuple[int, int]
    queries: list[Span] = field(default_factory=list[Span])
    keys: list[Span] = field(default_factory=list[Span])

    def takes(self, sequence: int, box: AttentionTile) -> bool:
        """Take a box that comes after those that are here, if it fits."""
        last = self.queries[-1][0] if self.queries else None
        if last == sequence and (
            box.q.start < self.queries[-1][2] or box.k.start < self.keys[-1][2]
        ):
            return False
        reach = (box.num_keys - 1, box.num_queries - 1)
        sides = [
            _side(*side)
            for side in zip(self.window, self.reach, window_of(box), reach, strict=True)
        ]
        if None in sides:
            return False
        self.window = (sides[0] or 0, sides[1] or 0)
        self.reach = (max(self.reach[0], reach[0]), max(self.reach[1], reach[1]))
        self.queries.append((sequence, box.q.start, box.q.stop))
        self.keys.append((sequence, box.k.start, box.k.stop))
        return True


def _side(bound: int, reach: int, other: int, other_reach: int) -> int | None:
    """Return the bound that does for both; None: there is none."""
    if bound == other:
        return bound
    if bound < 0:
        return other if reach <= other else None
    return bound if other < 0 and other_reach <= bound else None


def packed_calls(tiles: Sequence[AttentionTile], num_sequences: int) -> list[PackedCall]:
    """Return the calls that do what the boxes do; none where they are not fewer."""
    if len(tiles) < 2:
        return []
    boxes = [
        (sequence, box)
        for box in tiles
        for sequence in (range(num_sequences) if box.sequence is None else (box.sequence,))
    ]
    boxes.sort(key=lambda one: (one[0], one[1].q.start, one[1].k.start))
    calls: list[PackedCall] = []
    for sequence, box in boxes:
        if not any(call.takes(sequence, box) for call in calls):
            calls.append(PackedCall(window_of(box), (0, 0)))
            assert calls[-1].takes(sequence, box), "a box fits itself"
    return calls if len(calls) < len(tiles) else []


class _Rows:
    """The rows of one side of a call in a tensor [T, B, ...]: a part of it, or picked singly."""

    def __init__(self, spans: Sequence[Span], num_sequences: int, device: torch.device) -> None:
        self.lengths = tuple(stop - start for _, start, stop in spans)
        self.part: slice | None = None
        if num_sequences == 1 and all(one[2] == next[1] for one, next in pairwise(spans)):
            self.part = slice(spans[0][1], spans[-1][2])
        else:
            self.places = _places(tuple(spans), device)

    def take(self, x_TBHd: torch.Tensor) -> torch.Tensor:
        """Return [R, H, hd]."""
        return x_TBHd[self.places] if self.part is None else x_TBHd[self.part, 0]

    def take_lse(self, lse_BHT: torch.Tensor) -> torch.Tensor:
        """Return [H, R]."""
        if self.part is not None:
            return lse_BHT[0, :, self.part].contiguous()
        return lse_BHT.permute(2, 0, 1)[self.places].t().contiguous()

    def covers(self, whole_TBHd: torch.Tensor) -> bool:
        """Return whether these are all rows of a tensor."""
        return sum(self.lengths) == whole_TBHd.shape[0] * whole_TBHd.shape[1]

    def all(self, part_RHd: torch.Tensor, like_TBHd: torch.Tensor) -> torch.Tensor:
        """Return all rows where they are from, in the dtype that they have."""
        if self.part is not None:
            return part_RHd[:, None]
        whole_TBHd = part_RHd.new_empty(like_TBHd.shape)
        whole_TBHd[self.places] = part_RHd
        return whole_TBHd

    def add(self, whole_TBHd: torch.Tensor, part_RHd: torch.Tensor) -> None:
        """Add rows where they are from; each is there once, so sums have one order."""
        if self.part is not None:
            whole_TBHd[self.part, 0].add_(part_RHd)
        else:
            whole_TBHd[self.places] = whole_TBHd[self.places] + part_RHd


@lru_cache(maxsize=64)
def _places(spans: tuple[Span, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the sequence of each row of some spans."""
    rows = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
    sequences = torch.cat([torch.full((stop - start,), b) for b, start, stop in spans])
    return start_copy(rows, device), start_copy(sequences, device)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Hold a call with its rows on a device, and what its kernel is told."""

    queries: _Rows
    keys: _Rows
    told: FlashArguments

    @classmethod
    def of(cls, call: PackedCall, q: torch.Tensor) -> _Placed:
        """Return a call as it is for queries [T, B, H, hd]."""
        queries, keys = (_Rows(one, q.shape[1], q.device) for one in (call.queries, call.keys))
        told = FlashArguments(
            scale=q.shape[-1] ** -0.5,
            left=call.window[0],
            right=call.window[1],
            most_q=max(queries.lengths),
            most_k=max(keys.lengths),
            starts_q=starts_of(queries.lengths, q.device),
            starts_k=starts_of(keys.lengths, q.device),
        )
        return cls(queries, keys, told)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: PackedCall,
    flash: FlashAttention,
    merged: OnlineSoftmax,
) -> None:
    """Merge the attention of all segments of a call."""
    one = _Placed.of(call, q)
    parts = (one.queries.take(q), one.keys.take(k), one.keys.take(v))
    out_RHd, lse_HR = flash.forward(*parts, one.told)
    rows = one.queries.part
    if rows is not None:
        merged.add(AttentionTile(rows, slice(0, k.shape[0]), FULL), out_RHd[:, None], lse_HR[None])
        return
    length, num_sequences, heads, _ = q.shape
    out_TBHd = out_RHd.new_zeros(q.shape)
    out_TBHd[one.queries.places] = out_RHd
    lse_BHT = lse_HR.new_full((num_sequences, heads, length), float("-inf"))
    lse_BHT.permute(2, 0, 1)[one.queries.places] = lse_HR.t()
    whole = AttentionTile(slice(0, length), slice(0, k.shape[0]), FULL)
    merged.add(whole, out_TBHd, lse_BHT)


def backward_packed(
    dout: torch.Tensor,
    attended: SavedAttention,
    call: PackedCall,
    flash: FlashAttention,
    total: AttentionGradients | None,
) -> AttentionGradients:
    """Return `total`, or new gradients, with those of all segments of a call added."""
    one = _Placed.of(call, attended.q)
    q, out = one.queries.take(attended.q), one.queries.take(attended.out).to(dout.dtype)
    inputs = (q, one.keys.take(attended.k), one.keys.take(attended.v))
    lse_HR = one.queries.take_lse(attended.lse)
    found = flash.backward(one.queries.take(dout), inputs, (out, lse_HR), one.told)
    sides = (one.queries, one.keys, one.keys)
    whole = (attended.q, attended.k, attended.v)
    if total is None and all(rows.covers(x) for rows, x in zip(sides, whole, strict=True)):
        parts = zip(sides, found, whole, strict=True)
        return AttentionGradients(*(rows.all(part, like) for rows, part, like in parts))
    total = AttentionGradients.zeros(*whole) if total is None else total
    for rows, sums, part in zip(sides, total, found, strict=True):
        rows.add(sums, part)
    return total
