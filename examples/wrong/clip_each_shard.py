"""Clipping by the norm of the local shard: every rank scales its part by another number.

What you would have seen: a gradient norm that is too small by about the root of the number of
ranks, different in every rank's log, and a loss that looks like any other.
Public issue: https://github.com/pytorch/pytorch/issues/72548 (closed: FSDP got a method of its
own; the note in its docstring warns, nothing refuses).
Cause: under FSDP1 `model.parameters()` are this rank's slices. `torch.nn.utils.clip_grad_norm_` is
right for DDP and for FSDP2 (whose slices are DTensors), and silently local here. It is so in torch
2.13.
Mended here: squares are summed over the ranks (FSDP's own `clip_grad_norm_` does so in fp32, and
refuses the float64 of a proof).
"""

import torch
import torch.distributed as dist
from tiny import adamw, batch, cross_entropy, decoder, rows
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import echelon as ec

MESH = {"dp": 2}
CLIP_NORM = 0.5


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device, clipped by the norm of all gradients."""
    model = decoder(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        return cross_entropy(model(inputs_BT), labels_BT)

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model), clip_norm=CLIP_NORM)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Clip as one would without shards."""
    return train(case, over_ranks=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Clip by the norm over all ranks."""
    return train(case, over_ranks=True)


def train(case: ec.VerifyCase, over_ranks: bool) -> ec.OnRank:
    """Return this rank of FSDP1."""
    model = FullyShardedDataParallel(
        decoder(case), device_id=torch.device(case.device), use_orig_params=True
    )
    optimizer = adamw(model)

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = rows(number, case.rank, MESH["dp"])
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        if over_ranks:
            norm = get_total_norm([w.grad for w in model.parameters() if w.grad is not None]) ** 2
            dist.all_reduce(norm)
            norm = norm.sqrt()
            clip_grads_with_norm_(model.parameters(), CLIP_NORM, norm)
        else:
            norm = clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
