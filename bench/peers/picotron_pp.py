"""picotron's 1F1B over stages of the Hugging Face Llama.

Its own model needs a GPU; its schedule and its messages do not.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bench.harness.data import global_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, join, llama
from bench.peers.picotron import picotron_module
from bench.peers.torch_pp import Stage


class _Model(nn.Module):
    """A stage under the names that picotron's loop calls it by."""

    def __init__(self, stage: Stage, backward: Any) -> None:
        super().__init__()
        self.stage = stage
        self.backward = functools.partial(backward, self)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: Any
    ) -> torch.Tensor:
        del position_ids  # the stage counts them itself
        return self.stage(input_ids if hidden_states is None else hidden_states)


class _Batches:
    """The microbatches of one step, as picotron's data loader gives them."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, count: int) -> None:
        self.grad_acc_steps = count
        self._rows = iter(list(zip(inputs.chunk(count), labels.chunk(count), strict=True)))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        inputs, labels = next(self._rows)
        return {"input_ids": inputs, "position_ids": inputs, "target_ids": labels}


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    pipeline = picotron_module("pipeline_parallel.pipeline_parallel")
    rank, count = join(settings)
    manager: Any = importlib.import_module("picotron.process_group_manager")
    manager.process_group_manager = SimpleNamespace(
        pp_rank=rank,
        pp_world_size=count,
        pp_is_first_stage=rank == 0,
        pp_is_last_stage=rank == count - 1,
        pp_prev_rank=rank - 1,
        pp_next_rank=rank + 1,
        cp_dp_world_size=1,
    )
    stage = Stage(llama(settings), rank, count)
    model = _Model(stage, pipeline.PipelineParallel.backward)
    optimizer = adamw(settings, stage.parameters())
    size, microbatches = settings.size, settings.mode.microbatches
    shape = (size.global_sequences // microbatches, size.sequence, size.hidden)

    def step(number: int) -> float | None:
        optimizer.zero_grad(set_to_none=True)
        batches = _Batches(*global_batch(settings, number), microbatches)
        loss = pipeline.train_step_pipeline_1f1b(model, batches, shape, "cpu", torch.float32)
        optimizer.step()
        return loss if rank == count - 1 else None

    return step
