"""torch.distributed.pipelining (1F1B) over the Hugging Face Llama, with DTensor TP and DDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from bench.harness.data import rank_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, cross_entropy, join, llama
from bench.peers.torch_tp import layer_plan


class Stage(nn.Module):
    """Hold the layers of one pipeline stage; the first embeds, the last has the head."""

    def __init__(self, whole: Any, index: int, count: int) -> None:
        """Keep stage `index` of `count` of the model `whole`."""
        super().__init__()
        inner = whole.model
        layers = len(inner.layers)
        start, end = layers * index // count, layers * (index + 1) // count
        self.embed_tokens = inner.embed_tokens if index == 0 else None
        self.layers = nn.ModuleList(inner.layers[start:end])
        self.rotary_emb = inner.rotary_emb
        self.norm = inner.norm if index == count - 1 else None
        self.lm_head = whole.lm_head if index == count - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states, or on the last stage logits."""
        h_BTD = x if self.embed_tokens is None else self.embed_tokens(x)
        positions = torch.arange(h_BTD.shape[1]).unsqueeze(0)
        rotary = self.rotary_emb(h_BTD, positions)
        for layer in self.layers:
            out = layer(
                h_BTD, attention_mask=None, position_ids=positions, position_embeddings=rotary
            )
            h_BTD = out[0] if isinstance(out, tuple) else out
        if self.lm_head is None or self.norm is None:
            return h_BTD
        return self.lm_head(self.norm(h_BTD))


def _split(module: Stage, mesh: Any, shared: bool) -> None:
    """Split one stage over the tensor mesh, in place."""
    if module.embed_tokens is not None:
        embed = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(module, mesh, {"embed_tokens": embed})
    if module.lm_head is not None:
        head = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(module, mesh, {"lm_head": head})
    for layer in module.layers:
        parallelize_module(layer, mesh, layer_plan(sequence_parallel=False, shared=shared))


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank of pp x dp x tp."""
    join(settings)
    mode = settings.mode
    mesh = init_device_mesh("cpu", (mode.pp, mode.dp, mode.tp), mesh_dim_names=("pp", "dp", "tp"))
    pp_rank, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module: nn.Module = Stage(llama(settings), pp_rank, mode.pp)
    if mode.tp > 1:
        assert isinstance(module, Stage)
        _split(module, mesh["tp"], settings.variant == "shared")
    if mode.dp > 1:
        module = nn.parallel.DistributedDataParallel(
            module, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True
        )
    stage = PipelineStage(
        module, pp_rank, mode.pp, torch.device("cpu"), group=mesh["pp"].get_group()
    )
    schedule = Schedule1F1B(stage, n_microbatches=mode.microbatches, loss_fn=cross_entropy)
    optimizer = adamw(settings, module.parameters())

    def step(number: int) -> float | None:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = rank_batch(settings, number, dp_rank, mode.dp)
        losses: list[torch.Tensor] = []
        if pp_rank == 0:
            schedule.step(inputs)
        elif pp_rank == mode.pp - 1:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        return sum(loss.item() for loss in losses) / len(losses) if losses else None

    return step
