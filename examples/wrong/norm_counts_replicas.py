"""A gradient norm that counts replicated weights once per tensor rank.

What you would have seen: the right loss and the right gradients; a norm in the log that grows with
the tensor-parallel degree, and clipping that bites at a smaller norm than was asked for.
Public issue: https://github.com/NVIDIA-NeMo/RL/pull/3788 (open; the same for replicated weights in
TransformerEngine: https://github.com/ROCm/TransformerEngine/pull/715).
Cause: each rank sums the squares of all that it holds and the sums are added over the tensor axis.
That is right for split weights; a norm's weight is whole on every rank.
Made here in few lines, as `get_grad_norm` did it.
Mended here: squares of replicated weights are counted on one rank only.
"""

import torch
import torch.distributed as dist
from tiny import adamw, batch, cross_entropy, decoder, mesh_of, rows
from tiny_tensor import tensor_plan
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grads_with_norm_

import echelon as ec

MESH = {"tp": 2}
CLIP_NORM = 0.5


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device, clipped by the norm of all gradients."""
    model = decoder(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        return cross_entropy(model(inputs_BT), labels_BT)

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model), clip_norm=CLIP_NORM)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Add the squares of all weights over the tensor ranks."""
    return train(case, count_once=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Count what is whole on every rank once."""
    return train(case, count_once=True)


def train(case: ec.VerifyCase, count_once: bool) -> ec.OnRank:
    """Return this tensor rank."""
    model = parallelize_module(decoder(case), mesh_of(case, MESH), tensor_plan())
    optimizer = adamw(model)

    def grad_norm() -> torch.Tensor:
        total = torch.zeros((), dtype=case.dtype)
        for weight in model.parameters():
            # A norm's weight has a gradient of partial sums until somebody asks for the whole.
            grad = weight.grad.redistribute(placements=weight.placements).to_local()
            if case.mesh["tp"] == 0 or not count_once or weight.placements != (Replicate(),):
                total += grad.pow(2).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = rows(number, 0, 1)
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        norm = grad_norm()
        clip_grads_with_norm_(model.parameters(), CLIP_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
