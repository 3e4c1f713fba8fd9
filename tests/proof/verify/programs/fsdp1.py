"""FSDP1, each block and the rest, flat parameters."""

import torch
from net import adamw, batch, built, loss_of, one_device
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import echelon as ec

MESH = {"dp": 2}
DTYPE = torch.float64
ORIGINAL = False
__all__ = ["one_device"]


def on_rank(case):
    model = built(case)
    for number, layer in enumerate(model.layers):
        model.layers[number] = FSDP(layer, use_orig_params=ORIGINAL, device_id=case.device)
    model = FSDP(model, use_orig_params=ORIGINAL, device_id=case.device)
    optimizer = adamw(model.parameters())

    def step(number):
        ids, labels = (rows.chunk(case.degrees["dp"])[case.mesh["dp"]] for rows in batch(number))
        loss = loss_of(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
