"""The Hugging Face Llama, the loss and the optimizer that most peers train."""
# pyright: reportMissingImports=false

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.harness.spec import Settings


def join(settings: Settings) -> tuple[int, int]:
    """Join the Gloo process group that the environment describes; return (rank, world size)."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=settings.timeout_s))
    return dist.get_rank(), dist.get_world_size()


def llama(settings: Settings) -> Any:
    """Return a `LlamaForCausalLM` with the same seeded weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = settings.size
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.sequence,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(config).float()
    model.train()
    return model


def cross_entropy(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over all positions."""
    flat = logits_BTV.reshape(-1, logits_BTV.shape[-1]).float()
    return nn.functional.cross_entropy(flat, labels_BT.reshape(-1))


def adamw(settings: Settings, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return fused AdamW; DTensors get a group of their own, as the fused kernel demands."""
    every = list(parameters)
    distributed = [p for p in every if hasattr(p, "device_mesh")]
    plain = [p for p in every if not hasattr(p, "device_mesh")]
    groups = [{"params": group} for group in (distributed, plain) if group]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
