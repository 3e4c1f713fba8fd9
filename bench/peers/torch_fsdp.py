"""torch FSDP2, alone or over DTensor tensor parallelism.

The ZeRO stage of the mode says whether parameters are freed after forward: not at stage 2. Variant
"root kept" leaves out the embedding, the last norm and the head, as `fully_shard` does unless told
otherwise. With replicas beside shards it is torch's hybrid (HSDP).
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.harness.data import rank_batch
from bench.harness.spec import Mode, Settings, StepFunction
from bench.peers.llama import adamw, join, llama
from bench.peers.plain import plain_step
from bench.peers.torch_tp import split


def data_mesh(mode: Mode) -> DeviceMesh:
    """Return the mesh of data ranks: one axis, or (replicate, shard) where both are split."""
    if mode.dp_shard > 1 and mode.dp_replicate > 1:
        names = ("replicate", "shard")
        return init_device_mesh("cpu", (mode.dp_replicate, mode.dp_shard), mesh_dim_names=names)
    return init_device_mesh("cpu", (mode.dp,), mesh_dim_names=("dp",))


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank of dp x tp, parameters sharded over dp."""
    join(settings)
    mode = settings.mode
    model = llama(settings)
    if mode.tp > 1:
        both = init_device_mesh("cpu", (mode.dp, mode.tp), mesh_dim_names=("dp", "tp"))
        split(settings, model, both["tp"], split_loss=False)
        mesh = both["dp"]
    else:
        mesh = data_mesh(mode)
    freed = mode.zero_stage != 2
    root_freed = None if mode.tp > 1 or settings.variant == "root kept" else freed
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=freed)
    fully_shard(model, mesh=mesh, reshard_after_forward=root_freed)
    optimizer = adamw(settings, model.parameters())
    dp_rank = dist.get_rank() // mode.tp
    return plain_step(
        model, optimizer, lambda number: rank_batch(settings, number, dp_rank, mode.dp)
    )
