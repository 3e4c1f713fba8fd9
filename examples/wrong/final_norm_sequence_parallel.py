"""Tensor + sequence parallelism: the final norm keeps only this rank's part of its gradient.

What you would have seen: the right loss for many steps; then copies of one small weight that
differ from rank to rank, and a checkpoint that holds whichever rank wrote it.
Public issue: https://github.com/NVIDIA/Megatron-LM/issues/1446 (closed; the same question for
other norms: https://github.com/NVIDIA/TransformerEngine/issues/435).
Cause: with sequence parallelism each tensor rank norms its own tokens, so the gradient of a norm's
weight is a partial sum. Whatever sums such gradients did not know of the final norm.
Made here with torch's styles: a plan that leaves the final norm out runs without a word.
Mended here: the norm is in the plan.
"""

import torch
from tiny import adamw, cross_entropy, decoder, mesh_of, plain_training, rows
from tiny_tensor import tensor_plan
from torch.distributed.tensor.parallel import parallelize_module

import echelon as ec

MESH = {"tp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Forget the final norm."""
    return train(case, norm_in_plan=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Follow the whole plan."""
    return train(case, norm_in_plan=True)


def train(case: ec.VerifyCase, norm_in_plan: bool) -> ec.OnRank:
    """Return this tensor rank."""
    plan = tensor_plan()
    if not norm_in_plan:
        del plan["norm"]
    model = parallelize_module(decoder(case), mesh_of(case, MESH), plan)
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(number, 0, 1)
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
