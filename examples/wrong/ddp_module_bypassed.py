"""DDP bypassed: the forward pass goes to `model.module`, and no gradient is ever reduced.

What you would have seen: a loss on rank 0 like that of one device with a smaller batch; rank 0 is
saved, and the other ranks' work is thrown away. No error, no warning.
Public issue: https://github.com/jingyaogong/minimind/pull/854 (open), one of many.
Cause: DDP arms its hooks in its own `forward`. Code that unwraps the model "for generation" and
keeps using it for the loss never comes by. It is so in torch 2.13.
Mended here: the forward pass goes through the wrapper.
"""

import torch
from tiny import adamw, cross_entropy, decoder, plain_training, rows
from torch.nn.parallel import DistributedDataParallel

import echelon as ec

MESH = {"dp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Call the module inside the wrapper."""
    return train(case, unwrap=True)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Call the wrapper."""
    return train(case, unwrap=False)


def train(case: ec.VerifyCase, unwrap: bool) -> ec.OnRank:
    """Return this replica."""
    model = DistributedDataParallel(decoder(case))
    forward = model.module if unwrap else model
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(number, case.rank, MESH["dp"])
        loss = cross_entropy(forward(inputs_BT), labels_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
