"""What one forward pass reads: a microbatch in the layout that the decoder computes in.

Shape suffixes: B sequences, T positions, N = T * B tokens, sequence first: token (t, b) is row
t * B + b, so a cut along the sequence is a contiguous block of rows and needs no copy to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORED_LABEL = -100
"""The label of a position that takes no part in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Hold the tokens of one microbatch.

    `tokens_N` and `labels_N` are int64; `sample_ids_B` are the global ids of the sequences. They
    key dropout, with the optimizer step `step` and the run's `seed`; `train` turns it on.
    """

    tokens_N: torch.Tensor
    labels_N: torch.Tensor
    sample_ids_B: torch.Tensor
    step: int = 0
    seed: int = 0
    train: bool = True

    @property
    def num_sequences(self) -> int:
        """Return B."""
        return self.sample_ids_B.numel()

    @property
    def sequence_length(self) -> int:
        """Return T."""
        return self.tokens_N.numel() // self.num_sequences

    def num_valid(self) -> int:
        """Return the number of tokens that take part in the loss."""
        return int((self.labels_N != IGNORED_LABEL).sum())

    @classmethod
    def from_rows(
        cls,
        tokens_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        sample_ids_B: torch.Tensor,
        *,
        step: int = 0,
        seed: int = 0,
        train: bool = True,
    ) -> TokenBatch:
        """Return the batch of sequences given one per row."""
        return cls(
            tokens_N=tokens_BT.t().reshape(-1).contiguous(),
            labels_N=labels_BT.t().reshape(-1).contiguous(),
            sample_ids_B=sample_ids_B,
            step=step,
            seed=seed,
            train=train,
        )
