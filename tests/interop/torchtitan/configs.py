"""A small configuration of torchtitan, for tests."""

from __future__ import annotations

SMALL = """
[training]
local_batch_size = 2
seq_len = 64
[parallelism]
data_parallel_shard_degree = 2
"""


def small(more: str = "", *, parallel: str = "") -> str:
    """Return a configuration of two data ranks with more in [training] or [parallelism]."""
    return SMALL.replace("seq_len = 64", f"seq_len = 64\n{more}") + parallel
