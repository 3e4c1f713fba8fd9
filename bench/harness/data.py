"""The synthetic data that every framework reads: four global batches that recur.

So the loss falls, and the losses of frameworks that start from the same weights must agree.
"""

from __future__ import annotations

import torch

from bench.harness.spec import Settings

NUM_BATCHES = 4


def global_batch(settings: Settings, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs, labels) of step `step`, both int64 of [sequences, positions]."""
    size = settings.size
    generator = torch.Generator().manual_seed(settings.seed * 1000 + step % NUM_BATCHES)
    tokens = torch.randint(
        0, size.vocab, (size.global_sequences, size.sequence + 1), generator=generator
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def rank_batch(
    settings: Settings, step: int, dp_rank: int, dp: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the global batch that data-parallel rank `dp_rank` of `dp` reads."""
    inputs, labels = global_batch(settings, step)
    rows = settings.size.global_sequences // dp
    mine = slice(dp_rank * rows, (dp_rank + 1) * rows)
    return inputs[mine], labels[mine]
