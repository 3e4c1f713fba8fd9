"""Gradient accumulation: the mean of the microbatches' means is not the mean over the tokens.

What you would have seen: a loss curve a little above (or below) that of the same batch without
accumulation; tokens of short sequences weigh more than those of long ones.
Public issues: https://github.com/huggingface/transformers/issues/24725 (2023), mended in October
2024 by https://github.com/huggingface/transformers/pull/34191.
Cause: each microbatch's loss is its own mean over the labels that count, and the sum of these is
divided by the number of microbatches. Microbatches have different numbers of labels.
Made here in few lines, as the Trainer did it.
Mended here: sums of token losses, divided once by the labels of all microbatches and replicas.
"""

import contextlib

import torch
import torch.distributed as dist
from tiny import IGNORED, adamw, batch, cross_entropy, decoder
from torch.nn.parallel import DistributedDataParallel

import echelon as ec

MESH = {"dp": 2}
MICROBATCHES = 2


def padded(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch whose sequences have from 2 to 9 labels that count."""
    inputs_BT, labels_BT = batch(step)
    labels_BT = labels_BT.clone()
    for row in range(len(labels_BT)):
        labels_BT[row, 2 + row :] = IGNORED
    return inputs_BT, labels_BT


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device, all sequences at once."""
    model = decoder(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = padded(step)
        return cross_entropy(model(inputs_BT), labels_BT)

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model))


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Divide each microbatch by its own labels."""
    return train(case, one_denominator=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Divide once, by the labels of all."""
    return train(case, one_denominator=True)


def train(case: ec.VerifyCase, one_denominator: bool) -> ec.OnRank:
    """Return this replica."""
    model = DistributedDataParallel(decoder(case))
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        parts = [part.chunk(MESH["dp"])[case.rank] for part in padded(number)]
        microbatches = list(zip(*(part.chunk(MICROBATCHES) for part in parts), strict=True))
        valid = (parts[1] != IGNORED).sum()
        dist.all_reduce(valid)
        total = torch.zeros((), dtype=case.dtype)
        for index, (inputs_BT, labels_BT) in enumerate(microbatches):
            last = index == MICROBATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits_BTV = model(inputs_BT)
                if one_denominator:
                    loss = cross_entropy(logits_BTV, labels_BT, "sum") * MESH["dp"] / valid
                else:
                    loss = cross_entropy(logits_BTV, labels_BT) / MICROBATCHES
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
