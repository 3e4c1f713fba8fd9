"""torch FSDP2 over DTensor tensor parallelism: the other torch composition for dp x tp."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.data import rank_batch
from bench.peers.llama import adamw, cross_entropy, join, llama
from bench.peers.torch_tp import split
from bench.spec import Settings, StepFunction


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank of dp x tp, parameters sharded over dp."""
    join(settings)
    mode = settings.mode
    model = llama(settings)
    mesh = init_device_mesh("cpu", (mode.dp, mode.tp), mesh_dim_names=("dp", "tp"))
    split(settings, model, mesh["tp"], split_loss=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = adamw(settings, model.parameters())
    dp_rank = dist.get_rank() // mode.tp

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = rank_batch(settings, number, dp_rank, mode.dp)
        logits = model(input_ids=inputs).logits
        if hasattr(logits, "full_tensor"):
            logits = logits.full_tensor()
        loss = cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
