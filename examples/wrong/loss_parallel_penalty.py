"""`loss_parallel`: a second term of the loss that reads log-probabilities gets a wrong gradient.

What you would have seen: the right loss, to the last digit; gradients of the second term (a KL, a
confidence penalty, label smoothing by hand) that lack their mean over the vocabulary.
Public issue: https://github.com/pytorch/pytorch/issues/190746 (open).
Cause: inside `loss_parallel` the backward of every split `log_softmax` is the identity, which is
right only where `nll_loss` follows and has done the rest. It is so in torch 2.13.
Mended here: the second term reads log-probabilities that were computed outside of the context.
"""

import torch
from tiny import adamw, batch, cross_entropy, decoder, mesh_of
from tiny_tensor import tensor_plan
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import echelon as ec

MESH = {"tp": 2}
SMOOTHING = 0.1


def smoothed(main: torch.Tensor, log_p_BTV: torch.Tensor) -> torch.Tensor:
    """Return the loss with labels smoothed: a part of every token's mean log-probability."""
    return (1 - SMOOTHING) * main - SMOOTHING * log_p_BTV.sum() / (log_p_BTV.numel())


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    model = decoder(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        logits_BTV = model(inputs_BT)
        return smoothed(cross_entropy(logits_BTV, labels_BT), logits_BTV.log_softmax(-1))

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model))


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Compute both terms inside `loss_parallel`."""
    return train(case, both_inside=True)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Compute the second term outside."""
    return train(case, both_inside=False)


def train(case: ec.VerifyCase, both_inside: bool) -> ec.OnRank:
    """Return this tensor rank."""
    plan = tensor_plan(replicated_logits=False)
    model = parallelize_module(decoder(case), mesh_of(case, MESH), plan)
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(number)
        logits: DTensor = model(inputs_BT)
        if both_inside:
            with loss_parallel():
                loss = smoothed(cross_entropy(logits, labels_BT), logits.log_softmax(-1))
                loss.backward()
        else:
            whole_BTV = logits.redistribute(placements=[Replicate()]).to_local()
            loss = smoothed(cross_entropy(whole_BTV, labels_BT), whole_BTV.log_softmax(-1))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
