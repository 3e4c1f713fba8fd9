"""Your own module as one more case: the peers' Hugging Face Llama by way of `ec.parallelize`.

The model is the one that the peers train, and so are its batches; the split is that of the plan,
along every axis. A step takes the global batch, and divides the sum of its losses once.
"""

from __future__ import annotations

import torch

import echelon as ec
from bench.harness.data import global_batch
from bench.harness.plans import bench_plan
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import join, llama
from echelon.core.event import EventList
from echelon.launch.host import keep_freed_memory
from echelon.parallel.module.loss import ModuleLoss, causal_count, causal_sum

LOSS = ModuleLoss(sum_of=causal_sum, count_of=causal_count)
"""That of "causal", of labels which are shifted already."""


class ModuleStep:
    """Take the steps of one rank; keeps what it sent for `recorded_bytes`."""

    def __init__(self, settings: Settings) -> None:
        """Build this rank's part of the module."""
        join(settings)
        keep_freed_memory()
        plan = bench_plan(settings)
        self.settings = settings
        self.events = EventList()
        whole = self._batch(0)
        rows = plan.layout.microbatch_sequences
        _, self.optimizer = ec.parallelize(
            llama(settings),
            plan,
            split="model.layers",
            loss=LOSS,
            example={name: one[:rows] for name, one in whole.items()},
            events=self.events,
        )

    def __call__(self, number: int) -> float:
        """Take optimizer step `number`; return the loss of the global batch."""
        loss = self.optimizer.backward(self._batch(number)).loss
        self.optimizer.step()
        return loss

    def _batch(self, number: int) -> dict[str, torch.Tensor]:
        inputs, labels = global_batch(self.settings, number)
        return {"input_ids": inputs, "labels": labels}


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    return ModuleStep(settings)


def recorded_bytes(step: ModuleStep, *, reset: bool) -> dict[str, int]:
    """Return the bytes per axis that the module says it sent since the last reset."""
    if reset:
        step.events.events.clear()
    return step.events.bytes_by_axis()
