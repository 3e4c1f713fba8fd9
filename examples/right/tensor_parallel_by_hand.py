"""Tensor parallelism by hand: autograd functions, heads and columns, a loss over split logits.

A template: replace model, batch and step by your own, then `echelon prove --subject FILE`.
The vocabulary is split in embedding and head; no rank sees whole logits.
"""

from typing import Any

import torch
import torch.distributed as dist
from attention import (
    BLOCKS,
    CLIP_NORM,
    LENGTH,
    RATE,
    Block,
    Decoder,
    batch,
    decoder,
    one_device,
)
from torch import nn
from torch.nn import functional as fn

import echelon as ec

__all__ = ["one_device"]

MESH = {"tp": 2}


class Copy(torch.autograd.Function):
    """The input of column layers: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Add the gradients up."""
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class Reduce(torch.autograd.Function):
    """The output of row layers: a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Add the parts up."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Pass the gradient on."""
        return grads[0]


class Row(nn.Module):
    """A row layer: a part of the inputs; the bias is added once, after the sum."""

    def __init__(self, layer: nn.Linear) -> None:
        """Take a part of the columns of a weight."""
        super().__init__()
        self.weight = nn.Parameter(part(layer.weight, 1))
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole output."""
        y = Reduce.apply(fn.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Column(nn.Module):
    """A column layer: a part of the outputs."""

    def __init__(self, layer: nn.Linear) -> None:
        """Take a part of the rows of a weight."""
        super().__init__()
        self.weight = nn.Parameter(part(layer.weight, 0))
        self.bias = None if layer.bias is None else nn.Parameter(part(layer.bias, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output."""
        return fn.linear(Copy.apply(x), self.weight, self.bias)


class Embedding(nn.Module):
    """An embedding of which each rank has a part of the rows."""

    def __init__(self, layer: nn.Embedding) -> None:
        """Take a part of the rows."""
        super().__init__()
        self.weight = nn.Parameter(part(layer.weight, 0))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return zeros for the ids of other ranks, and the sum over all."""
        ids_BT = ids_BT - len(self.weight) * dist.get_rank()
        absent = (ids_BT < 0) | (ids_BT >= len(self.weight))
        x_BTD = fn.embedding(ids_BT.masked_fill(absent, 0), self.weight)
        return Reduce.apply(x_BTD.masked_fill(absent[..., None], 0.0))


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def split(model: Decoder) -> Decoder:
    """Replace the layers of a decoder by their parts."""
    model.embed = Embedding(model.embed)  # pyright: ignore[reportAttributeAccessIssue]
    for index in range(BLOCKS):
        block: Any = model.blocks[index]
        assert isinstance(block, Block)
        for name in "qkv":
            setattr(block.attention, name, Column(getattr(block.attention, name)))
        block.attention.o = Row(block.attention.o)
        block.up, block.down = Column(block.up), Row(block.down)
    model.head = Column(model.head)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def summed_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the sum of the token losses; each rank has a part of the vocabulary."""
    largest = logits_BTV.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    shifted = logits_BTV - largest[..., None]
    labels_BT = labels_BT - logits_BTV.shape[-1] * dist.get_rank()
    absent = (labels_BT < 0) | (labels_BT >= logits_BTV.shape[-1])
    chosen = shifted.gather(-1, labels_BT.masked_fill(absent, 0)[..., None])[..., 0]
    chosen = Reduce.apply(chosen.masked_fill(absent, 0.0))
    return (Reduce.apply(shifted.exp().sum(-1)).log() - chosen).sum()


NAMES = {
    "embed.weight": ec.Logical(name="embed.weight", dim=0, axis="tp"),
    "head.weight": ec.Logical(name="head.weight", dim=0, axis="tp"),
    "blocks.{layer}.up.weight": ec.Logical(name="blocks.{layer}.up.weight", dim=0, axis="tp"),
    "blocks.{layer}.up.bias": ec.Logical(name="blocks.{layer}.up.bias", dim=0, axis="tp"),
    "blocks.{layer}.down.weight": ec.Logical(name="blocks.{layer}.down.weight", dim=1, axis="tp"),
    **{
        f"blocks.{{layer}}.attention.{name}.weight": ec.Logical(
            name=f"blocks.{{layer}}.attention.{name}.weight", dim=int(name == "o"), axis="tp"
        )
        for name in "qkvo"
    },
}


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this rank's part of each layer on all rows."""
    model = split(decoder(case))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    parts = {id(p) for module in model.modules() for p in split_of(module)}

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = batch(number)
        loss = summed_loss(model(inputs_BT, torch.arange(LENGTH)), labels_BT) / labels_BT.numel()
        loss.backward()
        squares = {
            True: torch.zeros((), dtype=case.dtype),
            False: torch.zeros((), dtype=case.dtype),
        }
        for p in model.parameters():
            squares[id(p) in parts] += p.grad.square().sum()
        dist.all_reduce(squares[True])
        norm = (squares[True] + squares[False]).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer, names=NAMES)


def split_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of a layer of which each rank has a part."""
    if isinstance(module, Column):
        return [p for p in (module.weight, module.bias) if p is not None]
    return [module.weight] if isinstance(module, Row | Embedding) else []
