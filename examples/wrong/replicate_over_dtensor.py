"""`replicate` (DDP) over DTensor: after the first forward pass the model has no weights left.

What you would have seen: no error and a loss that never goes down, or goes down only where a
module was left out; `model.parameters()` is empty once a forward pass has run.
Public issues: https://github.com/pytorch/torchtitan/issues/577 and
https://github.com/pytorch/pytorch/issues/152712 (both closed).
Cause: `replicate` takes every DTensor off the module and puts plain tensors in its place; an
optimizer (or a clip, or a checkpoint) that was built on the DTensors never sees a gradient. It is
so in torch 2.13.
Mended here: gradients are averaged over the data axis by hand, and the module is left as it is.
"""

import torch
import torch.distributed as dist
from tiny import adamw, cross_entropy, decoder, mesh_of, plain_training, rows
from tiny_tensor import tensor_plan
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor.parallel import parallelize_module

import echelon as ec

MESH = {"dp": 2, "tp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Compose `replicate` with tensor parallelism."""
    return train(case, composed=True)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Average by hand."""
    return train(case, composed=False)


def train(case: ec.VerifyCase, composed: bool) -> ec.OnRank:
    """Return this rank of two replicas of two tensor ranks."""
    mesh = mesh_of(case, MESH)
    model = parallelize_module(decoder(case), mesh["tp"], tensor_plan())
    optimizer = adamw(model)
    if composed:
        replicate(model, device_mesh=mesh["dp"])

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(number, case.mesh["dp"], MESH["dp"])
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        if not composed:
            for weight in model.parameters():
                local = weight.grad.to_local()
                dist.all_reduce(local, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
