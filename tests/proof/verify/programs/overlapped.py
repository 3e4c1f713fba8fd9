"""Replicas whose gradients are summed while backward goes on, and awaited before the update."""

import torch
import torch.distributed as dist
from net import adamw, batch, built, loss_of, one_device

import echelon as ec

MESH = {"dp": 2}
DTYPE = torch.float64
__all__ = ["one_device"]


def on_rank(case):
    model = built(case)
    optimizer = adamw(model.parameters())
    works = []
    first = case.mesh["dp"] == 0

    def reduce(parameter):
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)

    def step(number):
        ids, labels = (rows.chunk(case.degrees["dp"])[case.mesh["dp"]] for rows in batch(number))
        loss = loss_of(model(ids), labels) / case.degrees["dp"]
        loss.backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        ahead = torch.zeros_like(total)
        message = dist.isend(total, 1) if first else dist.irecv(ahead, 0)
        message.wait()
        return loss.detach() * case.degrees["dp"]

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
