# SPDX-License-Identifier: Apache-2.0
"""Parameters gathered in 8 bits: each rank makes the codes of its slice once a step.

Split: buckets of weights that are multiplied in 8 bits (`fp8_squares` in `layout/buckets.py`), into
       the slices of ZeRO 3, which begin and end anywhere in a row.
Sent:  once a step, after the update, the largest number of each square of those weights: one
       all-reduce of maxima over the ranks that hold the slices, of routed experts another. Then
       each gather of such a bucket sends codes, 1 byte of a number (`parallel/zero.py`).
Bytes: `data_bytes` in `cost/bytes/data.py`.
Must divide: fp8_block, every width of these layers on a rank.
Source: torchao, "float8 all-gather" for FSDP2 (one scale of a tensor there, of a square here).

Codes and scales are those that `quantised_weight` would make of the gathered weight: the largest
number of a square does not depend on how the square is cut. So nothing that a run computes changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.models.precision import E4M3, at_least_fp32
from echelon.parallel.kernels.fp8 import power_of_two_scales, rounded_to_fp8
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import range_as_rectangles
from echelon.parallel.transport.collectives import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """A run of numbers of a slice that is a box of squares of one weight, or of parts of them.

    `numbers` is its place in the slice, `shape` [rows of squares, rows of each, columns of squares,
    columns of each]. `weight` is the place of the weight's squares among those of the bucket,
    `columns` how many of them are side by side; `row` and `column` are those of the first square.
    """

    numbers: slice
    shape: tuple[int, ...]
    weight: slice
    columns: int
    row: int
    column: int

    def squares(self, of_bucket: torch.Tensor) -> torch.Tensor:
        """Return what a flat tensor has of the squares that the box touches: a view, a matrix."""
        rows, columns = self.shape[0], self.shape[2]
        of_weight = of_bucket[self.weight].view(-1, self.columns)
        return of_weight[self.row : self.row + rows, self.column : self.column + columns]

    def pieces(self, most: int) -> Iterator[_Box]:
        """Yield the box in pieces of whole rows of squares, of about `most` numbers."""
        row_numbers = prod(self.shape[1:])
        step = max(1, most // row_numbers)
        for row in range(0, self.shape[0], step):
            count = min(step, self.shape[0] - row)
            start = self.numbers.start + row * row_numbers
            yield _Box(
                numbers=slice(start, start + count * row_numbers),
                shape=(count, *self.shape[1:]),
                weight=self.weight,
                columns=self.columns,
                row=self.row + row,
                column=self.column,
            )


class SliceCodes:
    """The codes of the slices of a rank, of all buckets that are gathered in 8 bits."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        shards: tuple[Group, Group],
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> None:
        """Serve such buckets; `shards` hold the slices: of routed experts the second group."""
        coded = [bucket for bucket in buckets if bucket.fp8 is not None]
        self._alike = [
            (group, [bucket for bucket in coded if bucket.plan.expert is expert])
            for expert, group in zip((False, True), shards, strict=True)
        ]
        self._pieces = pieces

    @torch.no_grad()
    def refresh(self) -> None:
        """Make scales and codes of what the slices are now; every rank of a group does together."""
        for group, buckets in self._alike:
            if not buckets:
                continue
            first = buckets[0].value_slice
            counts = [bucket.plan.fp8_squares for bucket in buckets]
            largest = torch.zeros(
                sum(counts), dtype=at_least_fp32(first.dtype), device=first.device
            )
            parts = largest.split(counts)
            for bucket, part in zip(buckets, parts, strict=True):
                self._find_largest(bucket, part)
            # Maxima of what is no number depend on the transport; either gives a scale of none.
            largest.masked_fill_(torch.isnan(largest), math.inf)
            group.all_reduce(largest, name="parameters.largest", op="max")
            for bucket, part in zip(buckets, parts, strict=True):
                self._write_codes(bucket, power_of_two_scales(part))

    def _find_largest(self, bucket: Bucket, largest: torch.Tensor) -> None:
        """Write the largest number of the own slice in each square of a bucket; 0 where none is."""
        for box in self._boxes(bucket):
            tiles = bucket.value_slice[box.numbers].view(box.shape)
            found = torch.linalg.vector_norm(tiles, math.inf, dim=(1, 3))
            # A row may begin in one box and end in another, so a square may have several.
            there = box.squares(largest)
            torch.maximum(there, found.to(largest.dtype), out=there)

    def _write_codes(self, bucket: Bucket, scales: torch.Tensor) -> None:
        """Write the codes of the own slice, each number with the scale of its own square."""
        assert bucket.fp8 is not None, "it is gathered in 8 bits"
        bucket.fp8.scales.copy_(scales)
        for box in self._boxes(bucket):
            tiles = bucket.value_slice[box.numbers].view(box.shape)
            inverse = box.squares(scales).reciprocal()
            codes = rounded_to_fp8(tiles * inverse[:, None, :, None], E4M3)
            bucket.fp8.codes[box.numbers] = codes.flatten()

    def _boxes(self, bucket: Bucket) -> Iterator[_Box]:
        """Yield the boxes of which the own slice of a bucket consists, padding left out."""
        on_cpu = bucket.value_slice.device.type == "cpu"
        most = self._pieces.row_elements if on_cpu else self._pieces.gpu_row_elements
        for box in _whole_boxes(bucket):
            yield from box.pieces(most)


def _whole_boxes(bucket: Bucket) -> Iterator[_Box]:
    assert bucket.fp8 is not None, "it is gathered in 8 bits"
    block, own = bucket.fp8.block, bucket.own
    for slot in bucket.slots:
        rows, columns = slot.parameter.shape
        tiled = (rows // block, block, columns // block, block)
        start, stop = max(slot.start, own.start), min(slot.end, own.stop)
        position = start - own.start
        weight = slice(slot.start // block**2, slot.end // block**2)
        for offset, shape in range_as_rectangles(tiled, start - slot.start, stop - slot.start):
            yield _Box(
                numbers=slice(position, position + prod(shape)),
                shape=shape,
                weight=weight,
                columns=columns // block,
                row=offset[0],
                column=offset[2],
            )
            position += prod(shape)
