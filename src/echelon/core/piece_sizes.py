# SPDX-License-Identifier: Apache-2.0
"""Sizes of the pieces in which a rank works through large tensors, as one record.

Results depend on them only through the order of sums. Training takes fast sizes. A proof takes
small ones: otherwise a small model would be one piece in every loop, and no proof would show a
mistake in a second or last piece.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSizes:
    """Give the size of each kind of piece."""

    row_elements: int = 1 << 18
    """Elements of the rows that a kernel takes at a time on a CPU: they stay in cache between two
    passes."""
    gpu_row_elements: int = 1 << 24
    """The same on a GPU, 64 MiB of float32: enough to keep it busy."""
    loss_rows: int = 2048
    """Tokens whose logits are there at a time. Each part of the weight's gradient reads and writes
    all of it in float32, 8 bytes of an element against 2 FLOPs a token: on an H100 (989 TFLOP/s,
    3.35 TB/s) 1,181 tokens take as long to compute as to move."""
    product_rows: int = 256
    """Rows that are widened at a time for a product which adds up in a wider dtype, on a CPU."""
    tile_rows: int = 192
    """Rows of a tile of attention with a window, at the least. PyTorch's kernel on CPU takes 64
    rows at a time from here on, 32 below."""
    score_columns: int = 1024
    """Keys of a block of scores of the plain kernel of attention, at the most."""
    score_elements: int = 2**22
    """Scores of such a block, of all sequences and heads together."""
    score_rows: int = 16
    """Queries of such a block at the least, however many scores these have."""
    prompt_queries: int = 256
    """Queries of a prompt whose scores are held at once while text is written."""
    random_elements: int = 1 << 16
    """First values that are drawn at a time on a CPU: they stay in cache."""
    gpu_random_elements: int = 1 << 24
    """The same on a GPU: enough to keep it busy, with half a gigabyte of scratch memory."""
    shared_bytes: int = 1 << 18
    """The largest tensor that ranks of one host exchange through memory: activations of a few
    tokens. A larger one is sent."""
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
    buffer_bytes: int = 2 * 2**20
    """Bytes of a stored tensor that are read or copied at once, or one row if it is larger: small
    compared with the slice of a rank."""
    merged_bytes: int = 4 * 2**20
    """Bytes of the rows into which adapters are merged at once, and of the added rows."""
    compared_bytes: int = 8 * 2**20
    """Bytes of two copies of a tensor in files that are compared at a time."""
    text_bytes: int = 2**20
    """Bytes of a text that are read and encoded at a time, and what is left of their last line."""
    record_rows: int = 1024
    """Rows of a Parquet or Arrow file that are read at a time, and texts that are encoded."""
    shard_tokens: int = 2**27
    """Tokens of a file of prepared data, at the most."""
    muon_buckets: int = 4
    """Buckets of Muon whose pieces or results are on their way at a time."""
    muon_results: int = 2
    """Buckets of Muon whose results a rank has sent before it applies the results of others."""


TRAINING_PIECES = PieceSizes()
"""Fast sizes."""

PROOF_PIECES = PieceSizes(
    row_elements=80,
    gpu_row_elements=80,
    loss_rows=3,
    product_rows=3,
    tile_rows=2,
    score_columns=5,
    score_elements=1,
    score_rows=3,
    prompt_queries=3,
    random_elements=270,
    gpu_random_elements=270,
    shared_bytes=256,
    norm_elements=100,
    update_elements=100,
    gpu_update_elements=100,
    file_bytes=4096,
    buffer_bytes=2200,
    merged_bytes=4400,
    compared_bytes=400,
    text_bytes=5000,
    record_rows=7,
    shard_tokens=19_999,
    muon_buckets=2,
    muon_results=1,
)
"""Sizes that make a small model several pieces in every loop, the last one smaller: no width of it
is a multiple of elements, and no height of rows."""
