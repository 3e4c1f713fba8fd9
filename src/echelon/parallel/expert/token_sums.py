"""Rows added up by the token that they belong to, in the order of the token's experts.

Shape suffixes: n tokens, S rows (at most K for each token), D hidden.
"""

from __future__ import annotations

import torch
from torch.nn import functional as fn


class TokenSums:
    """Add up rows; row i belongs to token `slot_S[i] // top_k`."""

    def __init__(self, slot_S: torch.Tensor, num_tokens: int, top_k: int) -> None:
        """Find the rows of each token once: they are added up forward and in backward."""
        self._order_S = slot_S.argsort()
        tokens_S = slot_S // top_k
        counts_n = torch.bincount(tokens_S, minlength=num_tokens)
        self._starts_n = counts_n.cumsum(0) - counts_n

    def add_up(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Return x_nD; a token without rows gets zeros.

        One pass over the rows, with the same bits on every run, which atomic adds would not have.
        """
        if not len(rows_SD):
            return rows_SD.new_zeros((len(self._starts_n), rows_SD.shape[1]))
        return fn.embedding_bag(self._order_S, rows_SD, self._starts_n, mode="sum")
