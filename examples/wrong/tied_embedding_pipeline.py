"""Tied embeddings in a pipeline: two copies of one weight, each with half of its gradient.

What you would have seen: the right loss in step 1; then embedding and head, one weight in the
configuration, drift apart, and the checkpoint holds one of them.
Public issue: https://github.com/uw-syfi/piper/issues/13 (open); Megatron-LM explains what must be
done in https://github.com/NVIDIA/Megatron-LM/issues/299.
Cause: the first stage has the gradient through the lookup, the last one that through the logits.
Nothing in torch.distributed.pipelining (2.13) knows that they are the same weight.
Mended here: the two gradients are summed before the optimizer's step.
"""

import torch
import torch.distributed as dist
from tiny import adamw, cross_entropy, decoder, mesh_of, plain_training
from tiny_pipeline import MICROBATCHES, build_stages, run_schedule
from torch.distributed.pipelining import Schedule1F1B

import echelon as ec

MESH = {"pp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device, where embedding and head are one weight."""
    return plain_training(case, tied=True)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Leave each stage its own copy."""
    return train(case, sum_copies=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Sum the gradients of both copies."""
    return train(case, sum_copies=True)


def train(case: ec.VerifyCase, sum_copies: bool) -> ec.OnRank:
    """Return this stage; the last one calls its copy by the name of the tied weight."""
    mesh = mesh_of(case, MESH)
    first = case.mesh["pp"] == 0
    stages, models = build_stages(case, mesh, [case.mesh["pp"]])
    stage = models[0]
    copy = stage.embed.weight if first else stage.head.weight
    copy.data.copy_(decoder(case, tied=True).embed.weight.data)
    schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=cross_entropy)
    optimizer = adamw(stage)

    def step(number: int) -> torch.Tensor | None:
        loss = run_schedule(schedule, number, 0, 1)
        if sum_copies:
            dist.all_reduce(copy.grad, group=mesh.get_group("pp"))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    names = {"head.weight": "embed.weight"}
    return ec.OnRank(models=models, step=step, optimizer=optimizer, names=names)
