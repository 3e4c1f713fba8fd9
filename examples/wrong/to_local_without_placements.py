"""`to_local()` without `grad_placements`: a layer passes back a part of its gradient as the whole.

What you would have seen: the right loss in step 1 and the right gradients in the layer itself; all
that lies before it learns from one rank's part of the gradient.
Public issue: https://github.com/pytorch/torchtitan/issues/1805 (closed, mended by
https://github.com/pytorch/torchtitan/pull/1878).
Cause: inside a tensor-parallel layer that computes on plain tensors (experts, there) the gradient
of the replicated input is a partial sum; unless it is told so, `to_local` takes it for replicated.
It is so in torch 2.13: the default is documented, and it is silent.
Mended here: `to_local(grad_placements=[Partial()])`.
"""

import functools

import torch
from tiny import Block, adamw, cross_entropy, decoder, mesh_of, plain_training, rows
from tiny_tensor import tensor_plan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import Parameter
from torch.nn import functional as fn

import echelon as ec

MESH = {"tp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Say nothing of the gradient."""
    return train(case, grad_placements=None)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Say that it is a partial sum."""
    return train(case, grad_placements=[Partial()])


def feed_forward(
    block: Block, mesh: DeviceMesh, grad_placements: list[Partial] | None, h_BTD: DTensor
) -> torch.Tensor:
    """Return the feed-forward layer on plain tensors, as an expert would compute it."""
    whole_BTD = h_BTD.redistribute(placements=[Replicate()])
    x_BTD = whole_BTD.to_local(grad_placements=grad_placements)
    up, bias, down = (
        weight.to_local() for weight in (block.up.weight, block.up.bias, block.down.weight)
    )
    part_BTD = fn.linear(fn.gelu(fn.linear(x_BTD, up, bias)), down)
    summed = DTensor.from_local(part_BTD, mesh, [Partial()]).redistribute(placements=[Shard(1)])
    return summed.to_local()


def train(case: ec.VerifyCase, grad_placements: list[Partial] | None) -> ec.OnRank:
    """Return this tensor rank; the last block's feed-forward layer works on plain tensors."""
    mesh = mesh_of(case, MESH)
    plan = {name.replace("*", "[012]"): style for name, style in tensor_plan().items()}
    for name, style in tensor_plan().items():
        if "blocks" in name and not name.endswith(("up", "down")):
            plan[name.replace("*", "3")] = style
    model = parallelize_module(decoder(case), mesh, plan)
    block = model.blocks["3"]
    for layer, name, dim in (
        (block.up, "weight", 0),
        (block.up, "bias", 0),
        (block.down, "weight", 1),
    ):
        whole = getattr(layer, name).detach()
        setattr(layer, name, Parameter(distribute_tensor(whole, mesh, [Shard(dim)])))
    block.feed_forward = functools.partial(feed_forward, block, mesh, grad_placements)
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(number, 0, 1)
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
