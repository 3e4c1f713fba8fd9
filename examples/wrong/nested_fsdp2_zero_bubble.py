"""Nested FSDP2 + zero bubble V: weights are gathered anew between the two halves of backward.

What you would have seen: the right loss in step 1, no error; on some stages gradients that are off
by tens of per cent, on others weights that have no gradient at all and never move.
Public thread: https://github.com/pytorch/pytorch/pull/134052, where the schedule was taught to
call FSDP's `post_backward` by hand, since a split backward runs none of its hooks.
Cause: the input-gradient pass reshards each block (the default, `reshard_after_forward=True`), so
the weight-gradient pass, later, differentiates towards tensors that no longer are the parameters.
It is so in torch 2.13.
Mended here: `reshard_after_forward=False` keeps the weights whole until the step is over.
"""

from itertools import chain

import torch
from tiny import RATE, Decoder, mesh_of, plain_training
from tiny_pipeline import MICROBATCHES, build_stages, cross_entropy, run_schedule
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleZBVZeroBubble

import echelon as ec

MESH = {"pp": 2, "dp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Shard each block and the stage, with FSDP2's defaults."""
    return train(case, reshard=True)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Keep the weights whole from forward to the end of the step."""
    return train(case, reshard=False)


def train(case: ec.VerifyCase, reshard: bool) -> ec.OnRank:
    """Return this rank of a V-shaped pipeline, sharded over the data ranks."""
    mesh = mesh_of(case, MESH)
    rank = case.mesh["pp"]

    def shard(part: Decoder) -> torch.nn.Module:
        for block in part.blocks.values():
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
        return fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshard)

    stages, models = build_stages(case, mesh, [rank, 2 * MESH["pp"] - 1 - rank], shard)
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=cross_entropy)
    parameters = list(chain.from_iterable(model.parameters() for model in models))
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)

    def step(number: int) -> torch.Tensor | None:
        loss = run_schedule(schedule, number, case.mesh["dp"], MESH["dp"])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(models=models, step=step, optimizer=optimizer)
