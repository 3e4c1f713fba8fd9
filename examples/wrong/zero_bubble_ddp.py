"""Zero bubble + DDP: no replica ever hears of the others' gradients.

What you would have seen: the right loss in step 1, no error, no warning, and a loss that goes down
a little worse ever after. The replicas drift apart; only one of them is saved.
Public issue: https://github.com/pytorch/pytorch/issues/144530 (open).
Cause: the schedule splits backward into input and weight gradients and takes the second by
`torch.autograd.grad`, which skips the hooks on which DDP reduces. It is so in torch 2.13.
Mended here: no DDP; the gradients are averaged over the replicas after the schedule has run.
"""

from itertools import chain

import torch
import torch.distributed as dist
from tiny import RATE, mesh_of, plain_training
from tiny_pipeline import MICROBATCHES, build_stages, cross_entropy, run_schedule
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

import echelon as ec

MESH = {"pp": 2, "dp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Wrap each stage in DDP, as the composability guides say."""
    return train(case, ddp=True)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Average gradients by hand."""
    return train(case, ddp=False)


def train(case: ec.VerifyCase, ddp: bool) -> ec.OnRank:
    """Return this rank of two stages per pipeline rank, twice over the data."""
    mesh = mesh_of(case, MESH)
    group, rank = mesh.get_group("dp"), case.mesh["pp"]

    def wrap(part: torch.nn.Module) -> torch.nn.Module:
        return DistributedDataParallel(part, process_group=group) if ddp else part

    stages, models = build_stages(case, mesh, [rank, rank + MESH["pp"]], wrap)
    schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=cross_entropy)
    parameters = list(chain.from_iterable(model.parameters() for model in models))
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)

    def step(number: int) -> torch.Tensor | None:
        loss = run_schedule(schedule, number, case.mesh["dp"], MESH["dp"])
        if not ddp:
            for parameter in parameters:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(models=models, step=step, optimizer=optimizer)
