"""FSDP2, each block and the rest."""

import torch
from net import adamw, batch, built, loss_of, one_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import echelon as ec

MESH = {"dp": 2}
DTYPE = torch.float64
__all__ = ["one_device"]


def on_rank(case):
    model = built(case)
    mesh = init_device_mesh("cpu", (case.degrees["dp"],), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())

    def step(number):
        ids, labels = (rows.chunk(case.degrees["dp"])[case.mesh["dp"]] for rows in batch(number))
        loss = loss_of(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
