"""Small modules of our own for these tests, as different from the decoder as a user's may be."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCAB, LENGTH = 12, 23, 6


class Block(nn.Module):
    """Attention over all positions, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v)
        return x + self.scale * self.mlp(x)


class Transformer(nn.Module):
    """A tied head, a frozen table of positions, a scalar in each block; one block may be frozen."""

    def __init__(
        self, *, layers: int = 4, checkpointed: bool = False, frozen_block: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed
        if frozen_block:
            self.blocks[1].requires_grad_(False)

    def forward(self, tokens: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for index, block in enumerate(self.blocks):
            if index in skip:
                continue
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """Four-dimensional weights, a batch norm whose statistics are a rank's own, uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 5, 3, padding=1)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(5, 5, 3, padding=1, bias=False),
                    nn.GroupNorm(1, 5),
                    nn.ReLU(inplace=True),
                )
                for _ in range(3)
            )
        )
        self.head = nn.Linear(5, VOCAB)

    def forward(self, tokens: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        x = self.stem(tokens[:, None, None].to(self.stem.weight.dtype) / VOCAB)
        for index, stage in enumerate(self.stages):
            x = x if index in skip else x + stage(x)
        return self.head(x.mean(dim=2).transpose(1, 2))


class Nested(nn.Module):
    """Units in units, a unit that is used twice, one that shares a weight, tensors in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.outer = nn.ModuleList(Outer() for _ in range(2))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self, tokens: torch.Tensor, skip: tuple[int, ...] = ()
    ) -> dict[str, list[torch.Tensor]]:
        x = self.first(self.embedding(tokens))
        side = torch.zeros((), dtype=x.dtype)
        for index, outer in enumerate(self.outer):
            if index not in skip:
                out = outer(x=x)
                x, side = out["x"], side + out["side"][0]
        x = self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))
        return {"y": [self.head(x), side]}


class Outer(nn.Module):
    """A unit around a unit; what it gives beside its output feeds the loss directly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: torch.Tensor) -> dict[str, object]:
        y = x + self.after(torch.tanh(self.inner(x)))
        return {"x": y, "side": (y.square().mean(),)}


class Inner(nn.Module):
    """A weight that is computed from another, as in weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.size = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.size * self.direction / self.direction.norm(dim=1, keepdim=True)
        return nn.functional.linear(x, weight)


def make(name: str) -> nn.Module:
    """Return a module of float64 values that depend on nothing but its name."""
    torch.manual_seed(5)
    made = {
        "transformer": Transformer,
        "deep": lambda: Transformer(layers=10),
        "checkpointed": lambda: Transformer(checkpointed=True),
        "frozen block": lambda: Transformer(frozen_block=True),
        "convolutions": Convolutions,
        "nested": Nested,
    }[name]()
    return made.double()


def tokens(step: int, microbatch: int, rank: int) -> torch.Tensor:
    """Return two rows of tokens that no other rank, microbatch or step has."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    return torch.randint(VOCAB, (2, LENGTH), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
    """Return a loss of a forward through the whole module."""
    out = model(tokens, skip)
    y, side = (out["y"][0], out["y"][1]) if isinstance(out, dict) else (out, 0.0)
    target = tokens.roll(1, dims=1)
    return nn.functional.cross_entropy(y.reshape(-1, VOCAB), target.reshape(-1)) + side
