"""A module of your own under tensor and sequence parallelism: its rules, its proof, its loop.

echelon prove nano --module examples/own_module.py:make --set mesh.tp=2
torchrun --nproc-per-node 2 examples/own_module.py
torchrun --nproc-per-node 4 examples/own_module.py mesh.dp_shard=2 zero.stage=3
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import echelon as ec

VOCAB, WIDTH, HEADS, LENGTH, STEPS = 61, 32, 4, 16, 5

RULES = {
    "tokens": "vocabulary",
    "head": "vocabulary",
    "blocks.*.attention.qkv": ("column", 3),
    "blocks.*.attention.out": "row",
    "blocks.*.attention.heads": "divide",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}


class Attention(nn.Module):
    """Causal attention with one matrix for queries, keys and values."""

    def __init__(self) -> None:
        """Make two layers."""
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each position takes from those before it."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.attention = Attention()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        """Make two blocks."""
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of each position."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(step: int, data_rank: int) -> torch.Tensor:
    """Return the rows that a data rank reads in a step: tensor ranks have the same."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    return torch.randint(VOCAB, (4, LENGTH), generator=generator)


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next token."""
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make() -> tuple[nn.Module, Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    """Return the module, its batches, its loss, and how tensor ranks split it."""
    return Decoder(), batch, loss, {"tensor": RULES}


def main(settings: list[str]) -> None:
    """Train on as many ranks as there are."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plan = ec.plan("nano", settings=["mesh.tp=2", "mesh.sequence_parallel=true", *settings])
    model, optimizer = ec.parallelize(Decoder(), plan, tensor=RULES)
    for step in range(STEPS):
        value = loss(model, batch(step, optimizer.data_rank))
        optimizer.scale(value).backward()
        report = optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {value.item():.4f}  grad_norm {report.grad_norm:.4f}")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
