"""The one small model of all trainers here, and what it is asked: the same on all ranks."""

from __future__ import annotations

import os
from typing import Any

import torch

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS = 96, 32, 48, 4, 4, 2, 64
EXPERTS, TOP_K = 4, 2
LENGTH = 16
EPS = 1e-5
RATE = 1e-2


def tokens(step: int, rank: int) -> torch.Tensor:
    """Return the ids that a data rank trains on in a step, [2, T]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)


def asked() -> torch.Tensor:
    """Return the ids whose logits are compared, [1, T]."""
    return torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(7))


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def rank() -> int:
    """Return which rank this process is."""
    return int(os.environ["RANK"])


def llama(tied: bool = False) -> Any:
    """Return a Llama of transformers with seeded weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        use_cache=False,
        rms_norm_eps=EPS,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).float()
