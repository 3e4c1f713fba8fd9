"""Tensor parallelism with one key/value head: each rank's copy learns from its own queries only.

What you would have seen: the right loss for thousands of steps while the copies drift apart, then
a loss that explodes, with tensor parallelism only, and with multi-query attention only.
Public issue: https://github.com/bigcode-project/Megatron-LM/issues/35 (closed).
Cause: one key/value head cannot be split, so every tensor rank has all of it; its gradient through
this rank's queries is a part of the gradient, and nobody adds the parts up.
Made here in few lines of plain torch, as Megatron-LM splits attention.
Mended here: gradients of the shared projections are summed over the tensor ranks.
"""

import torch
import torch.distributed as dist
from tiny import HEAD, HIDDEN, VOCAB, adamw, batch, cross_entropy, mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as fn

import echelon as ec

MESH = {"tp": 2}


class MultiQuery(nn.Module):
    """Embedding, one layer of attention with one key/value head, head."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, HEAD, bias=False) for _ in range(2))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits_BTV."""
        x_BTD = self.embed(tokens_BT)
        h_BTD, q_weight, o_weight = x_BTD, self.q.weight, self.o.weight
        mesh = q_weight.device_mesh if isinstance(q_weight, DTensor) else None
        if mesh is not None:
            # What every tensor rank takes in has a gradient in parts.
            whole = DTensor.from_local(x_BTD, mesh, [Replicate()])
            h_BTD = whole.to_local(grad_placements=[Partial()])
            q_weight, o_weight = q_weight.to_local(), o_weight.to_local()
        q_BHTd = fn.linear(h_BTD, q_weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        k_BHTd, v_BHTd = (layer(h_BTD).unsqueeze(1).expand_as(q_BHTd) for layer in (self.k, self.v))
        out_BHTd = fn.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        out_BTD = fn.linear(out_BHTd.transpose(1, 2).flatten(2), o_weight)
        if mesh is not None:
            out_BTD = DTensor.from_local(out_BTD, mesh, [Partial()]).full_tensor()
        return self.head(x_BTD + out_BTD)


def model_of(case: ec.VerifyCase) -> MultiQuery:
    """Return the model with the same initial values everywhere."""
    torch.manual_seed(case.seed)
    return MultiQuery().to(case.dtype)


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    model = model_of(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        return cross_entropy(model(inputs_BT), labels_BT)

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model))


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Leave each copy its own gradient."""
    return train(case, sum_copies=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Sum the gradients of the copies."""
    return train(case, sum_copies=True)


def train(case: ec.VerifyCase, sum_copies: bool) -> ec.OnRank:
    """Return this tensor rank: queries and output are split by heads."""
    model, mesh = model_of(case), mesh_of(case, MESH)
    for layer, dim in ((model.q, 0), (model.o, 1)):
        whole = layer.weight.detach()
        layer.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(number)
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        if sum_copies:
            for layer in (model.k, model.v):
                dist.all_reduce(layer.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
