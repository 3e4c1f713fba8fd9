"""What torch's compositions share as subjects: initial weights, norm, clip, AdamW, shards, report.

A composition only says how forward and backward run. Its loss is that of a careful user of torch:
torch *averages* gradients over replicas, so each replica's token sum is divided by the tokens of
the global batch and multiplied by the number of replicas. What is then wrong is torch's doing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.layout.stage import decays
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.counter_random import initial_values
from echelon.models.decoder import Decoder
from echelon.parallel.storage.weights import Shard
from echelon.proof.subject import ProofBatch, StepRecord
from echelon.training.optimizer.step import learning_rate

Losses = dict[tuple[int, int], tuple[float, int]]
"""(data rank, microbatch) -> (sum of token losses, counted tokens)."""

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


class Composition(ABC):
    """One rank of a torch composition; a subject of the prover."""

    def __init__(self, place: RankContext, plan: Plan) -> None:
        """Build this rank's part of `plan`."""
        self.plan, self.rank = plan, place.rank
        self.here = plan.mesh.coordinates(place.rank)
        self.dp = plan.mesh.degree(*LOSS_AXES)
        self.dp_rank = plan.mesh.group(place.rank, *LOSS_AXES).index(place.rank)
        self.specs: dict[str, ParameterSpec] = {s.name: s for s in parameters(plan.model)}
        self.layers_run: dict[int, None] = {}
        self.build()
        self.weights = self.named_weights()
        self.optimizer = self._adamw()
        self._gradients: dict[str, list[Shard]] = {}

    @abstractmethod
    def build(self) -> None:
        """Make the modules of this rank and let torch split them."""

    @abstractmethod
    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank holds, by canonical name."""

    @abstractmethod
    def forward_backward(self, batch: ProofBatch, scale: float) -> Losses:
        """Run all microbatches; the loss of each is `scale` times the sum of its token losses."""

    def step(self, batch: ProofBatch, step: int) -> StepRecord:
        """Take optimizer step `step` on this rank's rows of `batch`."""
        tokens = int((batch.labels_BT != IGNORED_LABEL).sum())
        self.optimizer.zero_grad(set_to_none=True)
        self.layers_run.clear()
        losses = self.forward_backward(batch, self.dp / tokens)
        self._gradients = {
            name: self._shards(name, weight.grad)
            for name, weight in self.weights.items()
            if weight.grad is not None
        }
        loss, norm = self._agree(losses, tokens)
        self._update(step, norm)
        samples: list[int] = []
        for microbatch in range(self.plan.num_microbatches):
            samples += batch.microbatch(self.plan, self.dp_rank, microbatch).sample_ids
        return StepRecord(
            loss=loss,
            tokens=tokens,
            grad_norm=norm,
            microbatch_losses=losses,
            samples=tuple(samples),
            layers=self.blocks_run(),
        )

    def blocks_run(self) -> tuple[int, ...]:
        """Return the blocks that this rank ran forward in this step."""
        return tuple(self.layers_run)

    def gradients(self) -> Mapping[str, Sequence[Shard]]:
        """Return the gradients of the last step, reduced by torch and not clipped."""
        return self._gradients

    def parameters(self) -> Mapping[str, Sequence[Shard]]:
        """Return the parameters as they are now."""
        return {name: self._shards(name, weight) for name, weight in self.weights.items()}

    def decoder(
        self, blocks: Sequence[int] | None = None, *, first: bool = True, last: bool = True
    ) -> Decoder:
        """Return the plain decoder (or a part of it), whole tensors, initialised from the seed."""
        dtype = _DTYPES[self.plan.mathematics.precision.parameters]
        decoder = Decoder(self.plan.model, blocks=blocks, first=first, last=last).to(dtype)
        with torch.no_grad():
            for name, weight in decoder.named_parameters():
                seed = self.plan.mathematics.seed
                weight.copy_(initial_values(self.plan.model, self.specs[name], seed))
        for index, block in decoder.layers.items():
            self._watch(int(index), block)
        return decoder

    def token_batch(self, batch: ProofBatch, microbatch: int) -> TokenBatch:
        """Return one microbatch of this rank as the decoder reads it."""
        mine = batch.microbatch(self.plan, self.dp_rank, microbatch)
        ids = torch.tensor(mine.sample_ids)
        return TokenBatch.from_rows(mine.inputs_BT, mine.labels_BT, ids)

    def _watch(self, index: int, block: nn.Module) -> None:
        def note(*_: Any) -> None:
            self.layers_run.setdefault(index)

        block.register_forward_pre_hook(note)

    def _adamw(self) -> torch.optim.AdamW:
        settings = self.plan.mathematics.optimizer
        decayed = [w for name, w in self.weights.items() if decays(settings, self.specs[name])]
        others = [w for name, w in self.weights.items() if not decays(settings, self.specs[name])]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            foreach=False,
        )

    def _update(self, step: int, norm: float) -> None:
        settings = self.plan.mathematics.optimizer
        if settings.clip_norm is not None and norm > settings.clip_norm:
            for weight in self.weights.values():
                if weight.grad is not None:
                    weight.grad.mul_(settings.clip_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        self.optimizer.step()

    def _agree(self, losses: Losses, tokens: int) -> tuple[float, float]:
        """Return the global mean loss and the gradient norm, each element counted once."""
        counted = sum(total for total, _ in losses.values()) if self.here[Axis.TP] == 0 else 0.0
        squares = sum(
            float(shard.tensor.double().square().sum())
            for shards in self._gradients.values()
            for shard in shards
            if shard.primary
        )
        sums = torch.tensor([counted, squares], dtype=torch.float64)
        dist.all_reduce(sums)
        return float(sums[0]) / tokens, math.sqrt(float(sums[1]))

    def _shards(self, name: str, tensor: torch.Tensor) -> list[Shard]:
        """Return what this rank holds of a tensor; DTensors say where their part lies."""
        whole = self.specs[name].shape
        if not isinstance(tensor, DTensor):
            first = self.dp_rank == 0 and self.here[Axis.TP] == 0
            return [_shard(name, whole, (0,) * len(whole), tensor, first)]
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        local = tensor.to_local()
        if not local.numel():
            return []
        coordinate = tensor.device_mesh.get_coordinate() or []
        first = all(
            index == 0
            for index, placement in zip(coordinate, tensor.placements, strict=True)
            if not placement.is_shard()
        )
        return [_shard(name, whole, tuple(offset), local, first)]


def _shard(
    name: str,
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    tensor: torch.Tensor,
    primary: bool,
) -> Shard:
    return Shard(
        name=name,
        global_shape=whole,
        offset=offset,
        tensor=tensor.detach().clone(),
        primary=primary,
    )
