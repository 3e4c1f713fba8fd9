"""transformers' own tensor parallelism: `from_pretrained(..., tp_plan="auto")`, by its own rules.

It cuts what it reads from a file, so rank 0 writes the seeded model first.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from typing import Any

import torch.distributed as dist

from bench.harness.data import global_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, join, llama
from bench.peers.plain import plain_step


def build(settings: Settings) -> StepFunction:
    """Return the step of one tensor rank."""
    from transformers import LlamaForCausalLM

    rank, _ = join(settings)
    folder: list[Any] = [tempfile.mkdtemp(prefix="echelon-bench-tp-") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    if rank == 0:
        llama(settings).save_pretrained(folder[0])
    dist.barrier()
    model: Any = LlamaForCausalLM.from_pretrained(
        folder[0], tp_plan="auto", attn_implementation="sdpa"
    )
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    model.train()
    optimizer = adamw(settings, model.parameters())
    return plain_step(model, optimizer, partial(global_batch, settings))
