"""Stages of torch's pipelining, and replicas of each under DDP; layers count from 0 in each."""

import torch
from net import adamw, batch, built, loss_of, one_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import echelon as ec

MESH = {"pp": 2}
DTYPE = torch.float64
MICROBATCHES = 2
__all__ = ["one_device"]


class Part(nn.Module):
    def __init__(self, whole, index, count):
        super().__init__()
        share = len(whole.layers) // count
        self.layers = whole.layers[index * share : (index + 1) * share]
        self.embedding = whole.embedding if index == 0 else None
        self.head = whole.head if index == count - 1 else None

    def forward(self, h):
        h = h if self.embedding is None else self.embedding(h)
        for layer in self.layers:
            h = layer(h)
        return h if self.head is None else self.head(h)


def on_rank(case):
    whole = built(case)
    mesh = init_device_mesh("cpu", (case.degrees["pp"],), mesh_dim_names=("pp",))
    index, count = case.mesh["pp"], case.degrees["pp"]
    part = Part(whole, index, count)
    stage = PipelineStage(part, index, count, case.device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=True)
    optimizer = adamw(part.parameters())

    def step(number):
        ids, labels = batch(number)
        losses = []
        if index == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) / MICROBATCHES if losses else None

    offset = index * (2 // count)
    return ec.OnRank(model=stage, step=step, optimizer=optimizer, layer_offsets=(offset,))
