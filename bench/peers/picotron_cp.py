"""picotron's ring attention in the Hugging Face Llama, from a clone beside the peers' environment.

Its own model needs a GPU; its ring does not, once `torch.cuda.synchronize` does nothing. It takes
as many key as query heads, so fewer are repeated first, as its own model does.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import join, llama
from bench.peers.picotron import picotron_module
from bench.peers.torch_cp import attend_by, step_of


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
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
