"""Your own module as one more case: the peers' Hugging Face Llama by way of `ec.parallelize`.

The model, the loss and the loop are those that the peers train; the split is that of the plan.
"""

from __future__ import annotations

import torch.distributed as dist

import echelon as ec
from bench.harness.data import rank_batch
from bench.harness.plans import bench_plan
from bench.harness.spec import NotApplicable, Settings, StepFunction
from bench.peers.llama import cross_entropy, join, llama
from echelon.launch.host import keep_freed_memory

UNSPLIT = ("pp", "cp", "tp")


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank: forward, backward and update of a loop of one's own."""
    join(settings)
    keep_freed_memory()
    mode = settings.mode
    if cut := [axis for axis in UNSPLIT if getattr(mode, axis) > 1]:
        raise NotApplicable(f"data ranks only, and {mode.name} has {', '.join(cut)}")
    model, optimizer = ec.parallelize(llama(settings), bench_plan(settings))
    dp_rank = dist.get_rank()

    def step(number: int) -> float:
        inputs, labels = rank_batch(settings, number, dp_rank, mode.dp)
        loss = cross_entropy(model(input_ids=inputs).logits, labels)
        optimizer.scale(loss).backward()
        optimizer.step()
        return loss.item()

    return step
