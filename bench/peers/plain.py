"""Plain torch in one process: what the limits of every mode are computed from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.harness.data import global_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, cross_entropy, llama

Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""The inputs and the labels of a step, by its number."""


def build(settings: Settings) -> StepFunction:
    """Return the step of one process that holds the whole model and batch."""
    model = llama(settings)
    optimizer = adamw(settings, model.parameters())
    return plain_step(model, optimizer, partial(global_batch, settings))


def plain_step(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> StepFunction:
    """Return the step of a loop that knows of no ranks; logits that are split are gathered."""

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = batches(number)
        logits = model(input_ids=inputs).logits
        if hasattr(logits, "full_tensor"):
            logits = logits.full_tensor()
        loss = cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
