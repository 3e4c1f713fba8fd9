"""Ulysses by hand over two replicas: all-to-all swaps tokens for heads, and back.

A template: replace model, batch and step by your own, then `echelon prove --subject FILE`.
"""

from typing import Any

import torch
import torch.distributed as dist
from attention import CLIP_NORM, LENGTH, RATE, batch, decoder, one_device, summed_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as fn

import echelon as ec

__all__ = ["one_device"]

MESH = {"dp": 2, "cp": 2}


class Swap(torch.autograd.Function):
    """Split one dim over the ranks of a group and gather another."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, split: int, gathered: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Send part i along `split` to rank i."""
        ctx.dims, ctx.group = (split, gathered), group
        return swap(x, split, gathered, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Swap back."""
        split, gathered = ctx.dims
        return swap(grads[0], gathered, split, ctx.group), None, None, None


def swap(x: torch.Tensor, split: int, gathered: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all parts along `gathered` of this rank's part along `split`."""
    sent = [part.contiguous() for part in x.chunk(group.size(), dim=split)]
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent, group=group)
    return torch.cat(received, dim=gathered)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train on the tokens of this rank, of the rows of its replica."""
    mesh = init_device_mesh(case.device.type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    group = mesh.get_group("cp")
    model = decoder(case)

    def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # [B, H, T/cp, E] -> [B, H/cp, T, E], and back
        q, k, v = (Swap.apply(x, 1, 2, group) for x in (q, k, v))
        y = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        return Swap.apply(y, 2, 1, group)

    for block in model.blocks:
        block.attention.mix = mix
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    positions_T = torch.arange(LENGTH).chunk(MESH["cp"])[case.mesh["cp"]]

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(MESH["dp"])[case.mesh["dp"]].chunk(MESH["cp"], dim=1)[case.mesh["cp"]]

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = batch(number)
        logits = model(part(inputs_BT), positions_T)
        loss = summed_loss(logits, part(labels_BT)) / labels_BT.numel()
        loss.backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        dist.all_reduce(flat)
        start = 0
        for p in model.parameters():
            p.grad.copy_(flat[start : start + p.numel()].view_as(p))
            start += p.numel()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return {"loss": whole, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
