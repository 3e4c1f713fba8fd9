"""Modules for tests of threads: plain, tied, and a Llama of `transformers`, each with a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

F64 = torch.float64
LIMIT = 1e-10
"""How far replicas may be from the full batch, in float64."""


class Tied(nn.Module):
    """A model of tokens whose head is its embedding, with one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5] * 6))

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        x = self.again(torch.tanh(self.first(self.embed(tokens)))) * self.scale
        return {"logits": self.head(x), "more": (x.sum((1, 2)), "name")}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))


def llama() -> nn.Module:
    """A Llama of `transformers` with grouped queries and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_cache=False,
    )
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def vectors(rows: int) -> dict[str, torch.Tensor]:
    return {"input": torch.randn(rows, 5, dtype=F64)}


def tokens(rows: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, 11, (rows, 4))}


def padded(rows: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, 7, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": torch.randint(0, 32, (rows, 7)), "attention_mask": mask}


Make = tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]], Callable[..., Any]]
MODELS: dict[str, Make] = {
    "mlp": (mlp, vectors, lambda out: out),
    "tied": (Tied, tokens, lambda out: out["logits"]),
    "llama": (llama, padded, lambda out: out.logits),
}


def both(name: str, rows: int) -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    """Return a module in float64, a copy of it, and a batch."""
    torch.manual_seed(3)
    make, batch_of, _ = MODELS[name]
    model = make().to(F64)
    return model, copy.deepcopy(model), batch_of(rows)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [one.grad for one in model.parameters()]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
