"""FSDP2's divide factor on a mesh of one rank: gradients are divided twice.

What you would have seen: with experts on all ranks (ep = world size), the right loss and experts
whose gradients are world size times too small: the mend of `expert_gradients_doubled.py`,
overdone.
Public thread: https://github.com/pytorch/pytorch/pull/167178 (November 2025) made the factor count
on a mesh of one rank at all; before, it was ignored there.
Cause: where sums are forced, or gradients are float16 (or float64), the factor is applied before
or after the reduction too, and the one-rank path divides by it on its own. It is so in torch 2.13.
Mended here: half of the factor is given, in a way that the two divisions make the right one.
"""

import expert_gradients_doubled as doubled
import torch
from expert_gradients_doubled import Experts
from tiny import adamw, cross_entropy, mesh_of, rows
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import echelon as ec

MESH = {"dp": 1, "ep": 2}
one_device = doubled.one_device


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Give the number of ranks that brought tokens, as on any other mesh."""
    return train(case, factor=float(case.world_size))


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Give its root."""
    return train(case, factor=float(case.world_size) ** 0.5)


def train(case: ec.VerifyCase, factor: float) -> ec.OnRank:
    """Return this rank: experts split over all ranks, the rest sharded."""
    mesh = mesh_of(case, MESH)
    model = doubled.model_of(case)
    model.group = mesh.get_group("ep")
    experts: Experts = model.experts
    experts.w_EDD = nn.Parameter(distribute_tensor(experts.w_EDD.data, mesh["ep"], [Shard(0)]))
    fully_shard(experts, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh._flatten("all"))
    experts.set_gradient_divide_factor(factor)
    # Backends without a sum that divides on the way (Gloo) need plain sums.
    experts.set_force_sum_reduction_for_comms(True)
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(number, case.rank, case.world_size)
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
