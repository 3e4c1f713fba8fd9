"""torch DistributedDataParallel. Variants: "accelerate" drives it, "zero1" shares out the state."""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.harness.data import rank_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, cross_entropy, join, llama


def _optimizer(settings: Settings, model: Any) -> torch.optim.Optimizer:
    if settings.variant != "zero1":
        return adamw(settings, model.parameters())
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def build(settings: Settings) -> StepFunction:
    """Return the step of one replica."""
    if settings.variant == "accelerate":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    rank, world = join(settings)
    model: Any
    optimizer: Any
    if settings.variant == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        whole = llama(settings)
        model, optimizer = accelerator.prepare(whole, adamw(settings, whole.parameters()))
        backward = accelerator.backward
    else:
        model = DistributedDataParallel(llama(settings), gradient_as_bucket_view=True)
        optimizer = _optimizer(settings, model)
        backward = torch.Tensor.backward

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = rank_batch(settings, number, rank, world)
        loss = cross_entropy(model(input_ids=inputs).logits, labels)
        backward(loss)
        optimizer.step()
        return loss.item()

    return step
