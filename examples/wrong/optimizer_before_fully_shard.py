"""An optimizer made before `fully_shard`: it steps on parameters that nobody uses any more.

What you would have seen: right losses, right gradients, a gradient norm in the log, and a model
that never changes: the curve is flat from the first step on.
Public thread: https://github.com/huggingface/accelerate/pull/3394 ("doesn't result in a working
training loop"; Accelerate now replaces the optimizer's parameters); also
https://github.com/huggingface/accelerate/issues/3209.
Cause: `fully_shard` puts new parameters (DTensors) into the modules; the optimizer holds the old
ones, whose gradients are None, and a step over no gradients is no error. It is so in torch 2.13.
Mended here: shard first, then make the optimizer.
"""

import torch
from tiny import adamw, cross_entropy, decoder, mesh_of, plain_training, rows
from torch.distributed.fsdp import fully_shard

import echelon as ec

MESH = {"dp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Make the optimizer first."""
    return train(case, optimizer_first=True)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Shard first."""
    return train(case, optimizer_first=False)


def train(case: ec.VerifyCase, optimizer_first: bool) -> ec.OnRank:
    """Return this rank of FSDP2."""
    model = decoder(case)
    early = adamw(model)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh_of(case, MESH))
    fully_shard(model, mesh=mesh_of(case, MESH))
    optimizer = early if optimizer_first else adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(number, case.rank, MESH["dp"])
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
