"""Megatron-core's all-reduce of a strided gradient: each rank keeps its own part.

What you would have seen: the right loss to the last digit; with tensor parallelism and a head of
one's own (a fused or chunked loss) all that lies before it learns from one rank's part of the
vocabulary.
Public issue: https://github.com/NVIDIA/Megatron-LM/issues/5337 (closed, mended in June 2026), met
by https://github.com/NovaSky-AI/SkyRL/pull/1886 in a fused head.
Cause: `_reduce` all-reduces `input_.contiguous()`, which for a strided tensor is a copy, and
returns `input_`. A transpose behind `copy_to_tensor_model_parallel_region` makes the gradient
strided. It is so in 0.16.
Mended here: the transpose stands before the region.
Needs megatron-core (tried with 0.16).
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from tiny import adamw, batch, cross_entropy, decoder, mesh_of, plain_training
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as fn

import echelon as ec

MESH = {"tp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Enter the tensor-parallel region, then transpose, as the fused head did."""
    return train(case, transpose_first=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Transpose first."""
    return train(case, transpose_first=True)


def train(case: ec.VerifyCase, transpose_first: bool) -> ec.OnRank:
    """Return this tensor rank: the head is split over the vocabulary, by Megatron's region."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=MESH["tp"])
    model, mesh = decoder(case), mesh_of(case, MESH)
    whole = model.head.weight.detach()
    model.head.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    optimizer = adamw(model)
    group = parallel_state.get_tensor_model_parallel_group()

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(number)
        x_BTD = model.stream(inputs_BT)
        if transpose_first:
            x_TBD = copy_to_tensor_model_parallel_region(x_BTD.transpose(0, 1).contiguous(), group)
        else:
            x_TBD = copy_to_tensor_model_parallel_region(x_BTD, group).transpose(0, 1).contiguous()
        part_TBV = fn.linear(x_TBD, model.head.weight.to_local())
        logits_TBV = DTensor.from_local(part_TBV, mesh, [Shard(2)]).full_tensor()
        loss = cross_entropy(logits_TBV, labels_BT.t())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
