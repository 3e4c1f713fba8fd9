"""Ring attention by hand: keys and values travel round, each pass back sends their gradients on.

A template: replace model, batch and step by your own, then `echelon prove --subject FILE --late`.
Each rank has an equal part of the tokens, in order. Results are merged by their log-sum-exp.
"""

from typing import Any

import torch
import torch.distributed as dist
from attention import CLIP_NORM, LENGTH, RATE, batch, decoder, one_device, summed_loss
from torch import nn

import echelon as ec

__all__ = ["one_device"]

MESH = {"cp": 4}


def pass_on(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Send tensors to the next rank, and return those of the rank before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    calls = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in sent]
    calls += [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in received]
    for handle in dist.batch_isend_irecv(calls):
        handle.wait()
    return received


def mask_of(source: int, length: int) -> torch.Tensor:
    """Return which keys of a rank the queries of this rank see, [T, T]."""
    rank, places = dist.get_rank(), torch.arange(length)
    return (rank * length + places)[:, None] >= (source * length + places)[None, :]


class Ring(torch.autograd.Function):
    """Causal attention over the tokens of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Merge what each part of the keys gives."""
        rank, world, scale = dist.get_rank(), dist.get_world_size(), q.shape[-1] ** -0.5
        held, out = [k, v], torch.zeros_like(q)
        total = torch.full_like(q[..., :1], float("-inf"))
        for turn in range(world):
            source = (rank - turn) % world
            scores = q @ held[0].transpose(-1, -2) * scale
            scores = scores.masked_fill(~mask_of(source, q.shape[-2]), float("-inf"))
            if source <= rank:
                part = scores.logsumexp(-1, keepdim=True)
                merged = torch.logaddexp(total, part)
                out = out * (total - merged).exp() + (scores - merged).exp() @ held[1]
                total = merged
            if turn < world - 1:
                held = pass_on(held)
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Go round once more; the gradients of keys and values travel with them."""
        q, k, v, out, total = ctx.saved_tensors
        (dout,) = grads
        rank, world, scale = dist.get_rank(), dist.get_world_size(), q.shape[-1] ** -0.5
        delta = (dout * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(q)
        held = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for turn in range(world):
            source = (rank - turn) % world
            if source <= rank:
                scores = q @ held[0].transpose(-1, -2) * scale
                scores = scores.masked_fill(~mask_of(source, q.shape[-2]), float("-inf"))
                weights = (scores - total).exp()
                held[3] = held[3] + weights.transpose(-1, -2) @ dout
                dscores = weights * (dout @ held[1].transpose(-1, -2) - delta) * scale
                dq = dq + dscores @ held[0]
                held[2] = held[2] + dscores.transpose(-1, -2) @ q
            held = pass_on(held)
        return dq, held[2], held[3]


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train on this rank's tokens."""
    model = decoder(case)
    for block in model.blocks:
        block.attention.mix = Ring.apply
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    cp, rank = MESH["cp"], case.mesh["cp"]
    positions_T = torch.arange(LENGTH).chunk(cp)[rank]

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = batch(number)
        logits = model(inputs_BT.chunk(cp, dim=1)[rank], positions_T)
        loss = summed_loss(logits, labels_BT.chunk(cp, dim=1)[rank]) / labels_BT.numel()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return {"loss": whole, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
