"""Small modules whose blocks are a chain, and some whose blocks are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from echelon.parallel.module.loss import ModuleLoss

WIDTH = 6


class Chain(nn.Module):
    """Embedding, blocks that take a mask, norm; `walk` is the loop over the blocks."""

    def __init__(self, walk: Callable[[Any, Any, Any], Any] | None = None, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self._walk = walk or plain

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self._walk(self, self.embed(tokens), tokens))


def plain(model: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = functional.gelu(block(x))
    return x


def made(walk: Callable[[Any, Any, Any], Any] | None = None) -> Chain:
    """Return a chain with one seed."""
    torch.manual_seed(3)
    return Chain(walk).double()


def tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a microbatch."""
    made = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(11, (2, 5), generator=made)}


LOSS = ModuleLoss(
    sum_of=lambda output, batch: output.square().mul(torch.arange(WIDTH)).sum(),
    count_of=lambda batch: batch["tokens"].numel(),
)
