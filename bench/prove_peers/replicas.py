"""DistributedDataParallel and FSDP2 (`fully_shard`), with gradient accumulation."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.prove_peers.composition import Composition, Losses
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.decoder import Decoder
from echelon.proof.subject import ProofBatch


class Replicated(Composition):
    """DDP: every rank holds all weights; synchronises on the last microbatch."""

    decoder_: Decoder
    module: nn.Module

    def build(self) -> None:
        """Wrap the decoder."""
        self.decoder_ = self.decoder()
        self.module = DistributedDataParallel(self.decoder_)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return all weights."""
        return dict(self.decoder_.named_parameters())

    def forward_backward(self, batch: ProofBatch, scale: float) -> Losses:
        """Accumulate over the microbatches of this rank."""
        losses: Losses = {}
        count = self.plan.num_microbatches
        for microbatch in range(count):
            mine = self.token_batch(batch, microbatch)
            with self.synchronised(microbatch == count - 1):
                loss: torch.Tensor = self.module(None, mine, scale=scale)
                loss.backward()
            losses[self.dp_rank, microbatch] = (loss.item() / scale, mine.num_valid())
        return losses

    def synchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a microbatch runs: gradients are reduced on the last."""
        assert isinstance(self.module, DistributedDataParallel)
        return contextlib.nullcontext() if last else self.module.no_sync()


class Sharded(Replicated):
    """FSDP2: blocks and root are sharded over the data ranks."""

    def build(self) -> None:
        """Shard the decoder."""
        mesh = init_device_mesh("cpu", (self.dp,))
        self.decoder_ = self.decoder()
        for block in self.decoder_.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(self.decoder_, mesh=mesh)
        self.module = self.decoder_

    def synchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Switch gradient synchronisation on for the last microbatch only."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


def ddp(place: RankContext, plan: Plan) -> Composition:
    """Return DDP as a subject."""
    return Replicated(place, plan)


def fsdp2(place: RankContext, plan: Plan) -> Composition:
    """Return FSDP2 as a subject."""
    return Sharded(place, plan)
