# SPDX-License-Identifier: Apache-2.0
"""Matrices gathered in int8: blocks of each slice are rounded, and whole units are what they say.

Split: buckets of matrices, into the slices of ZeRO 3, padded so that no block is in two of them.
Sent:  in place of a slice, a scale for each of its blocks and a code of 1 byte for each number: one
       all-gather of bytes, before each use (or the first of a step, with secondary slices).
Bytes: `data_bytes` in `cost/bytes/data.py`.
Must divide: int8_block, the width of a row of every matrix on a rank.
Source: Wang et al., "ZeRO++", 2023, section 3.1 (qwZ); Dettmers et al., "8-bit Optimizers via
        Block-wise Quantization", 2022.

Forward and backward of all ranks, the owner of a slice included, take `code x scale`, so this is
mathematics: a block is `int8_block` neighbours of a row, wherever they lie, and no layout cuts one.
The gradient is that of the rounded matrix; the optimizer adds it to the slice, which is not
rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.models.precision import at_least_fp32
from echelon.parallel.tensor_memory import TensorMemory

LARGEST_CODE = 127
"""The code of the largest number of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Message:
    """Hold what ranks gather of a bucket: a piece of each, scales before codes."""

    whole: torch.Tensor
    """The pieces of all ranks [n x piece], bytes; the memory may be away."""
    memory: TensorMemory
    """Whose memory it is in."""
    block: int
    """Numbers that share a scale."""
    dtype: torch.dtype
    """That of the parameters."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Return the dtype of scales."""
        return at_least_fp32(self.dtype)

    @torch.no_grad()
    def piece(self, values: torch.Tensor) -> torch.Tensor:
        """Return what a rank puts in of its slice: bytes of scales, then of codes."""
        blocks = values.view(-1, self.block).to(self.scale_dtype)
        scales = block_scales(blocks)
        codes = block_codes(blocks, scales)
        return torch.cat((scales.view(torch.uint8), codes.view(-1).view(torch.uint8)))

    @torch.no_grad()
    def write_values(self, values: torch.Tensor, num_pieces: int) -> None:
        """Fill a bucket [n x slice] with what has been gathered."""
        pieces = self.whole.view(num_pieces, -1)
        size = self.scale_dtype.itemsize
        num_blocks = pieces.shape[1] // (size + self.block)
        # In one dim: of a single piece the row may be no whole number of scales long.
        scales = pieces[:, : num_blocks * size].reshape(-1).view(self.scale_dtype)
        codes = pieces[:, num_blocks * size :].view(torch.int8)
        torch.mul(
            codes.unflatten(1, (num_blocks, self.block)),
            scales.view(num_pieces, num_blocks, 1),
            out=values.detach().view(num_pieces, num_blocks, self.block),
        )


def block_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scale of each row of `blocks`: its largest number over 127; 1 of zeros."""
    scales = torch.linalg.vector_norm(blocks, float("inf"), dim=1) / LARGEST_CODE
    return scales.masked_fill_(scales == 0, 1.0)


def block_codes(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes of each row; of what is not finite, the scale tells."""
    codes = (blocks / scales[:, None]).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.nan_to_num_(0.0).to(torch.int8)
