# SPDX-License-Identifier: Apache-2.0
"""How large the pieces are in which a rank works through what is large, as one record.

No result depends on them but for the order of sums. Training takes the sizes that are fast; a proof
takes small ones, or a small model would go through every such loop once, and what is wrong with the
second piece, or with the last, would be in no proof.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.layout.attention_tiles import TILE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSizes:
    """Give the size of each kind of piece."""

    row_elements: int = 1 << 18
    """Elements of the rows that a kernel takes at a time on a CPU: so many stay in cache between
    two passes over them."""
    gpu_row_elements: int = 1 << 24
    """The same on a GPU, 64 MiB of float32: enough to keep it busy, little beside the whole."""
    loss_rows: int = 2048
    """Tokens whose logits are there at a time. Each part of the weight's gradient reads and writes
    all of it in float32, 8 bytes of an element against 2 FLOPs a token: on an H100 (989 TFLOP/s,
    3.35 TB/s) 1,181 tokens take as long to compute as to move."""
    product_rows: int = 256
    """Rows that are widened at a time for a product which adds up in a wider dtype, on a CPU."""
    tile_rows: int = TILE_ROWS
    """Rows of a tile of attention with a window, at the least."""
    norm_elements: int = 1 << 16
    """Elements that are added up in their own precision for the gradient norm, on a CPU; 256 times
    as many on a GPU."""
    update_elements: int = 1 << 20
    """Elements of a fused update that casts too, on a CPU."""
    gpu_update_elements: int = 1 << 24
    """The same on a GPU: enough to keep it busy."""
    file_bytes: int = 8 * 2**20
    """The largest transfer of a file of offload, whole pages: one large tensor is moved by several
    threads."""
    muon_buckets: int = 4
    """Buckets of Muon whose pieces or results are on their way at a time."""
    muon_results: int = 2
    """Buckets of Muon of which a rank has sent its results and not applied those of others."""


TRAINING_PIECES = PieceSizes()
"""What is fast."""

PROOF_PIECES = PieceSizes(
    row_elements=100,
    gpu_row_elements=100,
    loss_rows=3,
    product_rows=3,
    tile_rows=2,
    norm_elements=100,
    update_elements=100,
    gpu_update_elements=100,
    file_bytes=4096,
    muon_buckets=2,
    muon_results=1,
)
"""What lets a small model go through every loop over pieces several times, the last time with less:
numbers of elements that no width of it is a multiple of."""
