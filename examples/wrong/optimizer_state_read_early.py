"""Reading the optimizer's state before the first step makes that step another one.

What you would have seen: right losses and right gradients; a first update that is about a third
too small, in runs that look into their state (or save) before they train, and not in others.
Public issue: https://github.com/pytorch/pytorch/issues/164929 (open; Megatron-FSDP had the same
and mended it: https://github.com/NVIDIA/Megatron-LM/pull/5976).
Cause: `get_optimizer_state_dict` makes missing state by a step with zero gradients and rate 0.
Weights stay, but Adam has counted: the first real step is corrected as if it were the second. It
is so in torch 2.13.
Mended here: the count goes back to 0.
"""

import torch
from tiny import adamw, cross_entropy, decoder, mesh_of, plain_training, rows
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import echelon as ec

MESH = {"dp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device, without a look into the state."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Read the state, then train."""
    return train(case, count_from_zero=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Read the state, put the count back, then train."""
    return train(case, count_from_zero=True)


def train(case: ec.VerifyCase, count_from_zero: bool) -> ec.OnRank:
    """Return this rank of FSDP2."""
    model = fully_shard(decoder(case), mesh=mesh_of(case, MESH))
    optimizer = adamw(model)
    get_optimizer_state_dict(model, optimizer)
    if count_from_zero:
        for state in optimizer.state.values():
            state["step"].zero_()

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(number, case.rank, MESH["dp"])
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
