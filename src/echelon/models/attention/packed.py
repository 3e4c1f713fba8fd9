# SPDX-License-Identifier: Apache-2.0
"""Many boxes of attention in one call: documents of any lengths, of all sequences of a batch.

Boxes that a kernel is asked for with the same window become the segments of one call. Where all
sequences have the same, the heads of all are heads of one sequence, and rows that lie side by side
are handed on as they are. Where each has its own, all rows are copied in the order of sequences,
and their results back; only rows that lie apart are looked up one by one. No row and no key is in
two segments of a call, so nothing is added up twice in one place.

What a call needs on the device is made once for a batch: every block finds it again by the tuple of
boxes, which `tiles_between` gives to all of them.

Shape suffixes: T queries or keys, B sequences, H heads, hd head_dim, R rows of all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from echelon.layout.attention_tiles import FULL, AttentionTile
from echelon.models.attention.flash import FlashArguments, FlashAttention, starts_of, window_of
from echelon.models.attention.interface import AttentionGradients, OnlineSoftmax, SavedAttention
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
    alike: bool = False
    """Whether every sequence has these segments, which are named of the first one."""
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
    """Return the calls that do what the boxes do; none where they are not fewer.

    Boxes that all sequences have are segments of the first one only: `PackedCall.alike`.
    """
    if len(tiles) < 2:
        return []
    alike = all(box.sequence is None for box in tiles)
    sequences = range(1 if alike else num_sequences)
    boxes = [
        (sequence, box)
        for box in tiles
        for sequence in (sequences if box.sequence is None else (box.sequence,))
    ]
    boxes.sort(key=lambda one: (one[0], one[1].q.start, one[1].k.start))
    calls: list[PackedCall] = []
    for sequence, box in boxes:
        if not any(call.takes(sequence, box) for call in calls):
            calls.append(PackedCall(window_of(box), (0, 0), alike))
            assert calls[-1].takes(sequence, box), "a box fits itself"
    return calls if len(calls) < len(tiles) else []


class _Rows:
    """The rows of one side of a call in a tensor [T, B, ...]: here, each is looked up."""

    part: slice | None = None
    """The rows, where every sequence has the same ones and they lie side by side."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.lengths = tuple(stop - start for _, start, stop in spans)
        self._places: Any = _places(tuple(spans), device)

    def covers(self, whole_TBHd: torch.Tensor) -> bool:
        """Return whether these are all rows of a tensor."""
        return sum(self.lengths) == whole_TBHd.shape[0] * whole_TBHd.shape[1]

    def take(self, x_TBHd: torch.Tensor) -> torch.Tensor:
        """Return [R, H, hd]."""
        return x_TBHd[self._places]

    def take_lse(self, lse_BHT: torch.Tensor) -> torch.Tensor:
        """Return [H, R], contiguous."""
        return lse_BHT.permute(2, 0, 1)[self._places].t().contiguous()

    def put(self, whole_TBHd: torch.Tensor, part_RHd: torch.Tensor) -> None:
        """Put rows where they are from."""
        whole_TBHd[self._places] = part_RHd

    def put_lse(self, whole_BHT: torch.Tensor, part_HR: torch.Tensor) -> None:
        """Put a log-sum-exp where its rows are from."""
        whole_BHT.permute(2, 0, 1)[self._places] = part_HR.t()

    def add(self, whole_TBHd: torch.Tensor, part_RHd: torch.Tensor) -> None:
        """Add rows where they are from; each is there once, so sums have one order."""
        whole_TBHd[self._places] = whole_TBHd[self._places] + part_RHd

    def all(self, part_RHd: torch.Tensor, like_TBHd: torch.Tensor) -> torch.Tensor:
        """Return rows that are all where they are from, in the dtype that they have."""
        whole_TBHd = part_RHd.new_empty(like_TBHd.shape)
        self.put(whole_TBHd, part_RHd)
        return whole_TBHd


class _RowsOfEach(_Rows):
    """The same rows of every sequence: its heads are more heads of theirs, so nothing is copied."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.lengths = tuple(stop - start for _, start, stop in spans)
        if all(one[2] == after[1] for one, after in pairwise(spans)):
            self._places = self.part = slice(spans[0][1], spans[-1][2])
        else:
            self._places = _places(tuple(spans), device)[0]

    def covers(self, whole_TBHd: torch.Tensor) -> bool:
        return sum(self.lengths) == whole_TBHd.shape[0]

    def take(self, x_TBHd: torch.Tensor) -> torch.Tensor:
        return x_TBHd[self._places].flatten(1, 2)

    def take_lse(self, lse_BHT: torch.Tensor) -> torch.Tensor:
        return lse_BHT[:, :, self._places].flatten(0, 1).contiguous()

    def put(self, whole_TBHd: torch.Tensor, part_RHd: torch.Tensor) -> None:
        whole_TBHd[self._places] = self.all(part_RHd, whole_TBHd)

    def put_lse(self, whole_BHT: torch.Tensor, part_HR: torch.Tensor) -> None:
        whole_BHT[:, :, self._places] = self.all_lse(part_HR, len(whole_BHT))

    def add(self, whole_TBHd: torch.Tensor, part_RHd: torch.Tensor) -> None:
        part_RBHd = self.all(part_RHd, whole_TBHd)
        if self.part is not None:
            whole_TBHd[self.part].add_(part_RBHd)
        else:
            whole_TBHd[self._places] = whole_TBHd[self._places] + part_RBHd

    def all(self, part_RHd: torch.Tensor, like_TBHd: torch.Tensor) -> torch.Tensor:
        return part_RHd.unflatten(1, like_TBHd.shape[1:3])

    def all_lse(self, part_HR: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """Return the log-sum-exp [B, H, R] of rows of all sequences."""
        return part_HR.unflatten(0, (num_sequences, -1))


class _AllRows(_Rows):
    """All rows, one sequence after the other: one copy of memory, no row is looked up."""

    def __init__(self, spans: Sequence[Span], length: int) -> None:
        self.lengths = tuple(stop - start for _, start, stop in spans)
        self.part = slice(0, length)

    def take(self, x_TBHd: torch.Tensor) -> torch.Tensor:
        return x_TBHd.transpose(0, 1).flatten(0, 1)

    def take_lse(self, lse_BHT: torch.Tensor) -> torch.Tensor:
        return lse_BHT.transpose(0, 1).flatten(1).contiguous()

    def put(self, whole_TBHd: torch.Tensor, part_RHd: torch.Tensor) -> None:
        whole_TBHd.copy_(_turned(part_RHd, whole_TBHd))

    def add(self, whole_TBHd: torch.Tensor, part_RHd: torch.Tensor) -> None:
        whole_TBHd.add_(_turned(part_RHd, whole_TBHd))

    def all_lse(self, part_HR: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """Return the log-sum-exp [B, H, T] of all rows of all sequences."""
        return part_HR.unflatten(1, (num_sequences, -1)).transpose(0, 1)


def _turned(part_RHd: torch.Tensor, like_TBHd: torch.Tensor) -> torch.Tensor:
    length, num_sequences = like_TBHd.shape[:2]
    return part_RHd.unflatten(0, (num_sequences, length)).transpose(0, 1)


@lru_cache(maxsize=64)
def _places(spans: tuple[Span, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the sequence of each row of some spans."""
    rows = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
    sequences = torch.cat([torch.full((stop - start,), b) for b, start, stop in spans])
    return start_copy(rows, device), start_copy(sequences, device)


def _rows(
    spans: Sequence[Span], shape: tuple[int, int], alike: bool, device: torch.device
) -> _Rows:
    """Return the rows of a side of [T, B, ...] with this shape."""
    if alike:
        return _RowsOfEach(spans, device)
    length, num_sequences = shape
    ends = [(b * length + start, b * length + stop) for b, start, stop in spans]
    in_order = ends[0][0] == 0 and all(one[1] == after[0] for one, after in pairwise(ends))
    if in_order and ends[-1][1] == length * num_sequences:
        return _AllRows(spans, length)
    return _Rows(spans, device)


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """Hold a call with its rows on a device."""

    queries: _Rows
    keys: _Rows
    window: tuple[int, int]
    scale: float | None = None

    def scaled(self, scale: float | None) -> PlacedCall:
        """Return the call with products multiplied by `scale`; None: over the root of the width."""
        return replace(self, scale=scale)

    def told(self, q: torch.Tensor) -> FlashArguments:
        """Return what the kernel is told for queries on this device."""
        return FlashArguments(
            scale=q.shape[-1] ** -0.5 if self.scale is None else self.scale,
            left=self.window[0],
            right=self.window[1],
            most_q=max(self.queries.lengths),
            most_k=max(self.keys.lengths),
            starts_q=starts_of(self.queries.lengths, q.device),
            starts_k=starts_of(self.keys.lengths, q.device),
        )


class _Same:
    """Compare what never changes by identity: a thousand boxes are not read again in each block."""

    def __init__(self, tiles: tuple[AttentionTile, ...]) -> None:
        self.tiles = tiles

    def __hash__(self) -> int:
        return id(self.tiles)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tiles is other.tiles


def placed_calls(
    tiles: Sequence[AttentionTile], q: torch.Tensor, k: torch.Tensor
) -> Sequence[PlacedCall]:
    """Return the calls that do what the boxes do for q [T,B,H,hd] and k [S,B,K,hd].

    There are none where they are not fewer. A tuple that was here lately is not read again.
    """
    if len(tiles) < 2:
        return ()
    return _placed_calls(_Same(tuple(tiles)), (q.shape[1], q.shape[0], k.shape[0]), q.device)


@lru_cache(maxsize=64)
def _placed_calls(
    same: _Same, sizes: tuple[int, int, int], device: torch.device
) -> tuple[PlacedCall, ...]:
    num_sequences, *lengths = sizes
    found: list[PlacedCall] = []
    for call in packed_calls(same.tiles, num_sequences):
        queries, keys = (
            _rows(spans, (length, num_sequences), call.alike, device)
            for spans, length in zip((call.queries, call.keys), lengths, strict=True)
        )
        found.append(PlacedCall(queries, keys, call.window))
    return tuple(found)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: PlacedCall,
    flash: FlashAttention,
    merged: OnlineSoftmax,
) -> None:
    """Merge the attention of all segments of a call."""
    rows, keys = call.queries, call.keys
    out_RHd, lse_HR = flash.forward(rows.take(q), keys.take(k), keys.take(v), call.told(q))
    part, columns = rows.part, slice(0, k.shape[0])
    length, num_sequences, heads, _ = q.shape
    if isinstance(rows, _RowsOfEach | _AllRows) and part is not None:
        lse_BHT = rows.all_lse(lse_HR, num_sequences)
        merged.add(AttentionTile(part, columns, FULL), rows.all(out_RHd, q), lse_BHT)
        return
    out_TBHd = out_RHd.new_zeros(q.shape)
    rows.put(out_TBHd, out_RHd)
    lse_BHT = lse_HR.new_full((num_sequences, heads, length), float("-inf"))
    rows.put_lse(lse_BHT, lse_HR)
    merged.add(AttentionTile(slice(0, length), columns, FULL), out_TBHd, lse_BHT)


def backward_packed(
    dout: torch.Tensor,
    attended: SavedAttention,
    call: PlacedCall,
    flash: FlashAttention,
    total: AttentionGradients | None,
) -> AttentionGradients:
    """Return `total`, or new gradients, with those of all segments of a call added."""
    rows, keys = call.queries, call.keys
    inputs = (rows.take(attended.q), keys.take(attended.k), keys.take(attended.v))
    outputs = (rows.take(attended.out).to(dout.dtype), rows.take_lse(attended.lse))
    found = flash.backward(rows.take(dout), inputs, outputs, call.told(attended.q))
    sides = (rows, keys, keys)
    whole = (attended.q, attended.k, attended.v)
    if total is None and all(side.covers(x) for side, x in zip(sides, whole, strict=True)):
        parts = zip(sides, found, whole, strict=True)
        return AttentionGradients(*(side.all(part, like) for side, part, like in parts))
    total = AttentionGradients.zeros(*whole) if total is None else total
    for side, sums, part in zip(sides, total, found, strict=True):
        side.add(sums, part)
    return total
