"""DTensor tensor parallelism: column and row linears, split vocabulary, `loss_parallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as fn

from bench.prove_peers.composition import Composition, Losses
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.decoder import Decoder
from echelon.models.operations import LossHead, Operations
from echelon.proof.subject import ProofBatch


class SplitVocabulary(Operations):
    """Let DTensor do the two operations whose weights are split over the vocabulary."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """Split over the one axis of `mesh`."""
        self.mesh = mesh

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Return token vectors: a masked partial lookup, then its sum over the ranks."""
        assert positions is None, "the proof of DTensor is of rotary positions"
        tokens = DTensor.from_local(batch.tokens_N, self.mesh, [Replicate()])
        vectors: Any = fn.embedding(tokens, weight_VD)
        return vectors.redistribute(placements=[Replicate()]).to_local()

    def head_loss(
        self, x_ND: torch.Tensor, head: LossHead, labels_N: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return scale x the sum of token losses; logits stay split (inside `loss_parallel`)."""
        x = DTensor.from_local(x_ND, self.mesh, [Replicate()])
        logits = fn.linear(x, head.weight_VD)
        loss: Any = fn.cross_entropy(logits, labels_N, reduction="sum", ignore_index=IGNORED_LABEL)
        return loss * scale


class TensorParallel(Composition):
    """Every linear of a block is column- or row-parallel; embedding and head by vocabulary."""

    decoder_: Decoder

    def build(self) -> None:
        """Split the decoder over the tensor ranks."""
        degree = self.plan.mesh.tp
        mesh = init_device_mesh("cpu", (degree,))
        self.decoder_ = self.decoder()
        columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        for block in self.decoder_.layers.values():
            styles = {name: ColwiseParallel() for name in columns}
            rows = {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
            parallelize_module(block, mesh, {**styles, **rows})
            for name in columns[:3]:
                # The block reads its number of heads off the width of its projections.
                block.get_submodule(name).out_features //= degree  # pyright: ignore
        for owner in (self.decoder_.embedding, self.decoder_.head):
            owner.weight = nn.Parameter(distribute_tensor(owner.weight.detach(), mesh, [Shard(0)]))
        self.decoder_.operations = SplitVocabulary(mesh)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return all weights, split ones as DTensors."""
        return dict(self.decoder_.named_parameters())

    def forward_backward(self, batch: ProofBatch, scale: float) -> Losses:
        """Accumulate over the microbatches; all tensor ranks see the same."""
        losses: Losses = {}
        for microbatch in range(self.plan.num_microbatches):
            mine = self.token_batch(batch, microbatch)
            with loss_parallel():
                loss: Any = self.decoder_(None, mine, scale=scale)
                loss.backward()
            value = float(loss.full_tensor()) / scale
            losses[self.dp_rank, microbatch] = (value, mine.num_valid())
        return losses


def dtensor(place: RankContext, plan: Plan) -> Composition:
    """Return DTensor tensor parallelism as a subject."""
    return TensorParallel(place, plan)
