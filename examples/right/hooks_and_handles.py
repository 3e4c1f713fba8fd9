"""Data parallelism by hooks: each gradient is reduced as soon as it is whole.

A template: replace model, batch and step by your own, then `echelon prove --subject FILE --late`.
Reductions are awaited before the step. Microbatches accumulate locally; biases and norms have no
weight decay; the update is fused.
"""

from typing import Any

import torch
import torch.distributed as dist
from ddp import IGNORED, MESH, MICROBATCHES, batch, model_of, summed_loss
from torch import nn

import echelon as ec

CLIP_NORM = 0.5


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW: matrices decay, vectors do not."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a warmup of four steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0))


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device: the mean over all labels of the batch."""
    model = model_of(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        return summed_loss(model(inputs_BT), labels_BT) / (labels_BT != IGNORED).sum()

    optimizer = optimizer_of(model)
    return ec.OneDevice(
        model=model,
        loss=loss,
        optimizer=optimizer,
        clip_norm=CLIP_NORM,
        scheduler=schedule_of(optimizer),
    )


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this replica."""
    model = model_of(case)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    handles: list[Any] = []
    last = False

    def reduce(parameter: torch.Tensor) -> None:
        if last:
            handles.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)

    def step(number: int) -> dict[str, torch.Tensor]:
        nonlocal last
        inputs_BT, labels_BT = (x.chunk(MESH["dp"])[case.mesh["dp"]] for x in batch(number))
        labels = (labels_BT != IGNORED).sum()
        dist.all_reduce(labels)
        total = torch.zeros((), dtype=case.dtype)
        parts = zip(inputs_BT.chunk(MICROBATCHES), labels_BT.chunk(MICROBATCHES), strict=True)
        for index, (x_BT, y_BT) in enumerate(parts):
            last = index == MICROBATCHES - 1
            loss = summed_loss(model(x_BT), y_BT) / labels
            loss.backward()
            total += loss.detach()
        for handle in handles:
            handle.wait()
        handles.clear()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return {"loss": total, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
