"""Accelerate asked for FSDP on CPU ranks: it trains plain replicas under DDP, without a word.

What you would have seen: the right loss and the right gradients, to the last digit; each rank holds
the whole model and its moments, so what was tried out on CPUs says nothing of the memory, or of the
code, of the run that it stands for.
Public thread: https://github.com/foundation-model-stack/fms-hf-tuning/pull/98 tells of the same
fallback by another switch (`--multi_gpu` beside an FSDP configuration: DDP, and out of memory); of
`cpu=True` there is none that we know.
Cause: `AcceleratorState` turns the kinds with an accelerator into FSDP and leaves MULTI_CPU out, so
that `prepare` wraps by DDP; the plugin is dropped. It is so in Accelerate 1.15 (state.py).
Mended here: torch's own `fully_shard`; the optimizer and the data alone are prepared.
Needs accelerate and transformers (tried with 1.15 and 5.23).
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import echelon as ec

sys.path.append(str(Path(__file__).resolve().parent.parent / "right"))

from accelerate_ddp import (
    CLIP_NORM,
    RATE,
    SEQUENCES,
    collate,
    model_of,
    one_device,
    rows_of,
    summed_loss,
)

MESH = {"dp": 2}

__all__ = ["one_device"]


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Let Accelerate prepare the model, with a plugin for FSDP2."""
    return train(case, by_hand=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Shard the model before."""
    return train(case, by_hand=True)


def train(case: ec.VerifyCase, *, by_hand: bool) -> ec.OnRank:
    """Train this rank's share of the rows, with one denominator for the loss."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = model_of(case)
    model = fully_shard(model) if by_hand else accelerator.prepare(model)
    rows = [row for step in range(case.num_steps + 1) for row in rows_of(step)]
    loader = DataLoader(rows, SEQUENCES // case.world_size, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    batches = iter(loader)

    def step(_: int) -> dict[str, torch.Tensor]:
        batch = next(batches)
        labels = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(labels)
        # Both wrappers take the mean over the ranks: made a sum.
        loss = summed_loss(model, batch) * case.world_size / labels
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
