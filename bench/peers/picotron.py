"""picotron's ring attention in the Hugging Face Llama, and its 1F1B over stages of that.

It is no package, but a clone in the folder of the peers. Its own model needs a GPU; its ring, its
schedule and its messages do not, once the `torch.cuda.synchronize` after each message does nothing.
Its ring takes as many key as query heads, so fewer are repeated first, as its own model does.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.harness.data import global_batch
from bench.harness.spec import NotApplicable, Settings, StepFunction
from bench.peers.llama import adamw, join, llama
from bench.peers.torch_cp import attend_by, step_of
from bench.peers.torch_pp import Stage


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    return _ring(settings) if settings.mode.cp > 1 else _one_f_one_b(settings)


def picotron_module(name: str) -> Any:
    """Return `picotron.NAME` from a clone of https://github.com/huggingface/picotron."""
    clone = Path(sys.prefix).parent / "picotron"
    sys.path.insert(0, str(clone))
    try:
        found = importlib.import_module(f"picotron.{name}")
    except ImportError as error:
        raise NotApplicable(f"{error}: clone huggingface/picotron to {clone}") from error
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_, **__: None
    return found


def _ring(settings: Settings) -> StepFunction:
    found = picotron_module("context_parallel.context_parallel")
    rank, world = join(settings)
    manager: Any = importlib.import_module("picotron.process_group_manager")
    manager.process_group_manager = SimpleNamespace(
        cp_rank=rank,
        cp_world_size=world,
        cp_send_rank=(rank + 1) % world,
        cp_recv_rank=(rank - 1) % world,
        cp_group=dist.group.WORLD,
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        q, k, v = (x.contiguous() for x in (q, k, v))
        return found.ring_attention(q, k, v, q.shape[-1] ** -0.5, True)

    model = llama(settings)
    attend_by(model, attend)
    return step_of(settings, model, rank, world)


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


def _one_f_one_b(settings: Settings) -> StepFunction:
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
