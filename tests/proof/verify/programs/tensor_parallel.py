"""A tensor-parallel plan of torch, with sequence parallelism around the norms."""

import torch
from net import adamw, batch, built, loss_of, one_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import echelon as ec

MESH = {"tp": 2}
DTYPE = torch.float64
__all__ = ["one_device"]


def on_rank(case):
    model = built(case)
    mesh = init_device_mesh("cpu", (case.degrees["tp"],), mesh_dim_names=("tp",))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": PrepareModuleInput(
                input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)
            ),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=True),
        }
        parallelize_module(layer, mesh, plan)
        parallelize_module(layer, mesh, {"up": ColwiseParallel()})
    optimizer = adamw(model.parameters())

    def step(number):
        ids, labels = batch(number)
        loss = loss_of(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
