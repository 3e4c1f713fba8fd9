"""Batches whose tokens do not matter, only where they stand."""

from __future__ import annotations

import torch

from echelon.models.batch import TokenBatch


def blank_batch(num_positions: int, num_sequences: int) -> TokenBatch:
    """Return whole sequences of token 0."""
    tokens_BT = torch.zeros(num_sequences, num_positions, dtype=torch.int64)
    return TokenBatch.from_rows(tokens_BT, tokens_BT, torch.arange(num_sequences))
