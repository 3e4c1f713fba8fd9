# SPDX-License-Identifier: Apache-2.0
"""Outer gradients in 8 bits: codes, and a scale for each block of them.

Sent:  per fragment: the largest number of each block over the ranks of a stage (inside of an
       island), then codes of 1 byte and scales of blocks, gathered over `dp_replicate`.
Bytes: `outer_bytes` in `cost/bytes/local_sgd.py`.
Error: with s the scale of a block (its largest number over 127, or over 448), a code is off by
           int8   at most s / 2                          half a step
           fp8    at most max(|x| / 16, s / 1024)        half a unit of e4m3, which has 3 digits
       and the mean of islands by the mean of these, for each is quantised once and added up in
       float32.
Source: Douillard et al., "Streaming DiLoCo", 2025, section 2.4 (codes that are sent, sums that are
        not); Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.core.choices.local_sgd import LocalSgd
from echelon.layout.islands import FragmentBlocks, blocks_between, fragment_of
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import slot_rectangles
from echelon.parallel.transport.collectives import Group

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest code of each kind; 448 is that of e4m3."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a parameter in a slice: where in the bucket's flat, and the first block of each."""

    place: slice
    rows: int
    columns: range
    first_block: int
    blocks_of_row: int
    block: int

    @property
    def width(self) -> int:
        """Return how many blocks of a row are touched."""
        return blocks_between(self.block, self.columns.start, self.columns.stop)

    def block_of_column(self, device: torch.device) -> torch.Tensor:
        """Return [columns] which of the touched blocks each column is in."""
        columns = torch.arange(self.columns.start, self.columns.stop, device=device)
        return columns // self.block - self.columns.start // self.block


class QuantisedGradients:
    """Bring the mean of what all islands moved to each of them, in codes of 8 bits."""

    def __init__(
        self,
        local: LocalSgd,
        buckets: Sequence[Bucket],
        groups: RankGroups,
        blocks: Sequence[FragmentBlocks],
    ) -> None:
        """Learn where the blocks of each fragment are in the slices of this rank."""
        self._local, self._groups, self._blocks = local, groups, blocks
        self._largest = LARGEST[local.gradients]
        self._parts = {
            (bucket.name, fragment): _parts(local, bucket, groups, fragment, known)
            for bucket in buckets
            for fragment, known in enumerate(blocks)
        }

    def largest_numbers(
        self, fragment: int, moved: Mapping[str, torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """Return [blocks] the largest number of each block, over the ranks of the stage.

        `moved` gives what this island moved, as slices by bucket.
        """
        most = like.new_zeros(self._blocks[fragment].total)
        for name, flat in moved.items():
            for part in self._parts[name, fragment]:
                here = _largest_in_rows(part, flat)
                most[_ids(part, flat.device).flatten()] = torch.maximum(
                    most[_ids(part, flat.device).flatten()], here.flatten()
                )
        if most.numel():
            stage = self._groups.stage
            stage.all_reduce(most, name=f"outer blocks.{fragment}", op="max").wait()
        return most

    def mean(self, bucket: Bucket, fragment: int, moved: torch.Tensor, most: torch.Tensor) -> None:
        """Put the mean of what all islands moved in the place of what this one `moved`."""
        parts = self._parts[bucket.name, fragment]
        if not parts:
            return
        scales = [most[_ids(part, moved.device)] / self._largest for part in parts]
        # What is not finite stays so: its scale tells.
        scales = [one.masked_fill(one == 0, 1.0) for one in scales]
        codes = torch.cat(
            [self._codes(part, moved, one) for part, one in zip(parts, scales, strict=True)]
        )
        flat_scales = torch.cat([one.flatten() for one in scales])
        islands, name = self._groups.islands, f"outer gradients.{bucket.name}"
        all_codes = _gathered(islands, codes, name)
        all_scales = _gathered(islands, flat_scales, f"outer gradients.{bucket.name}.scales")
        at_code = at_scale = 0
        for part in parts:
            rows, columns, width = part.rows, len(part.columns), part.width
            total = moved.new_zeros((rows, columns))
            which = part.block_of_column(moved.device)
            for island in range(islands.size):
                code = all_codes[island, at_code : at_code + rows * columns].view(rows, columns)
                scale = all_scales[island, at_scale : at_scale + rows * width].view(rows, width)
                total.add_(self._numbers(code, moved.dtype) * scale[:, which])
            moved[part.place].copy_(total.div_(self._local.islands).flatten())
            at_code, at_scale = at_code + rows * columns, at_scale + rows * width

    def _codes(self, part: _Part, moved: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the codes of a part as bytes, row by row."""
        x = moved[part.place].view(part.rows, len(part.columns))
        x = x / scales[:, part.block_of_column(moved.device)]
        if self._local.gradients == "int8":
            return x.round().to(torch.int8).view(torch.uint8).flatten()
        # Gloo sends no floats of 8 bits, but bytes.
        return x.float().to(torch.float8_e4m3fn).view(torch.uint8).flatten()

    def _numbers(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kind = torch.int8 if self._local.gradients == "int8" else torch.float8_e4m3fn
        return codes.contiguous().view(kind).to(dtype)


def _gathered(islands: Group, row: torch.Tensor, name: str) -> torch.Tensor:
    """Return [islands, len(row)]: the vector of each island."""
    whole = row.new_empty((islands.size, row.numel()))
    islands.all_gather(whole.view(-1), row, name=name).wait()
    return whole


def _largest_in_rows(part: _Part, flat: torch.Tensor) -> torch.Tensor:
    """Return [rows, blocks] the largest number of each touched block."""
    x = flat[part.place].view(part.rows, len(part.columns)).abs()
    which = part.block_of_column(flat.device).expand(part.rows, -1)
    return x.new_zeros((part.rows, part.width)).scatter_reduce_(1, which, x, "amax")


def _ids(part: _Part, device: torch.device) -> torch.Tensor:
    """Return [rows, blocks] the numbers of the touched blocks in the fragment."""
    rows = torch.arange(part.rows, device=device)[:, None] * part.blocks_of_row
    return part.first_block + rows + torch.arange(part.width, device=device)


def _parts(
    local: LocalSgd, bucket: Bucket, groups: RankGroups, fragment: int, known: FragmentBlocks
) -> tuple[_Part, ...]:
    flat, found, size = bucket.value_slice, list[_Part](), local.outer_block
    for slot in bucket.slots:
        if fragment_of(local, slot.spec) != fragment:
            continue
        for offset, part in slot_rectangles(slot, flat, groups.tensor_group_for(slot.spec)):
            rows = part.shape[0] if part.dim() == 2 else 1
            row = offset[0] if part.dim() == 2 else 0
            columns = range(offset[-1], offset[-1] + part.shape[-1])
            each = blocks_between(size, 0, slot.spec.shape[-1])
            start = part.storage_offset() - flat.storage_offset()
            found.append(
                _Part(
                    slice(start, start + part.numel()),
                    rows,
                    columns,
                    known.first[slot.spec.name] + row * each + columns.start // size,
                    each,
                    size,
                )
            )
    return tuple(found)
