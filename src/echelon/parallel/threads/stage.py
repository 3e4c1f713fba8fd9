# SPDX-License-Identifier: Apache-2.0
"""The whole model as one stage that all replicas compute, each in its thread.

The seven steps of a microbatch, as `torch.nn.DataParallel` has them:

    1. scatter      each replica gets its sequences of the microbatch
    2. replicate    once a step, before the first microbatch
    3. forward      in threads
    4. gather       the loss of each replica comes to the primary
    5. loss         their sum, there
    6. backward     its derivative goes to each replica, whose thread runs backward
    7. sum          gradients are added onto the primary, once a step, after the last microbatch

Our models end in the loss, so that is what is gathered; its number is known when backward has run
(`parallel/vocabulary.py`). Shape suffixes: B sequences of a microbatch, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from echelon.core.choices.threads import Threads
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.piece_sizes import PieceSizes
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.rank_model import RankModel
from echelon.parallel.threads.replicas import Replica, Replicas
from echelon.parallel.threads.workers import num_bytes, replica_devices
from echelon.parallel.transport.recorder import Recorder
from echelon.schedule.action import Schedule


class _LossOfReplicas(torch.autograd.Function):
    """Step 4 to 6: the losses of all replicas become one, whose backward runs theirs."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, stage: ThreadedStage, losses: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return where backward will write the sum of the losses."""
        total = losses[0].new_full((), float("nan"))
        ctx.stage, ctx.losses, ctx.total = stage, losses, total.detach()
        return total

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[None, None, None]:
        """Run the backward of every replica; write the loss."""
        ctx.total.copy_(ctx.stage.backward(ctx.losses, dloss))
        return None, None, None


class ThreadedStage:
    """Compute a microbatch on all replicas, as the stage of a pipeline of one rank."""

    first = True
    last = True

    def __init__(self, replicas: Replicas) -> None:
        """Run `replicas`."""
        self.replicas = replicas

    def __call__(
        self, x_ND: torch.Tensor | None, batch: TokenBatch, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Return scale x the sum of token losses: a number once backward, if any, has run."""
        assert x_ND is None, "the whole model has no stage before it"
        parts = self._scatter(batch)
        losses = self.replicas.run(
            "forward", lambda replica: replica.decoder(None, parts[replica.index], scale=scale)
        )
        if not torch.is_grad_enabled():
            return self._gather(losses)
        # Autograd calls a backward where some input has a gradient: this one stands for all
        # parameters, whose gradients go to the stores.
        anchor = torch.zeros((), requires_grad=True, device=self.replicas.primary.device)
        loss: torch.Tensor = _LossOfReplicas.apply(anchor, self, losses)
        return loss

    def backward(self, losses: Sequence[torch.Tensor], dloss: torch.Tensor) -> torch.Tensor:
        """Run backward of all replicas from the derivative of their sum; return that sum."""
        start = self.replicas.recorder.now()
        seeds = [dloss.to(loss.device, loss.dtype) for loss in losses]
        self.replicas.record("scatter", "seeds", start, sum(map(num_bytes, seeds[1:])))

        def run(replica: Replica) -> None:
            if replica is not self.replicas.primary:
                # Its gradients are summed when the step has ended, whatever microbatch this is.
                replica.store.start_backward(last=False)
            torch.autograd.backward(losses[replica.index], seeds[replica.index])
            replica.store.run_deferred()

        with torch.enable_grad():
            self.replicas.run("backward", run)
        return self._gather([loss.detach() for loss in losses])

    def _scatter(self, batch: TokenBatch) -> list[TokenBatch]:
        """Return each replica's sequences of a microbatch, on its device."""
        start, count = self.replicas.recorder.now(), len(self.replicas)
        parts = [part_of_batch(batch, index, count) for index in range(count)]
        sent = sum(num_bytes(one) for part in parts[1:] for one in part.tensors())
        parts = [
            part.to(replica.device) for part, replica in zip(parts, self.replicas, strict=True)
        ]
        self.replicas.record("scatter", "microbatch", start, sent)
        return parts

    def _gather(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the losses on the primary, in the order of the replicas."""
        start = self.replicas.recorder.now()
        here = [loss.to(self.replicas.primary.device) for loss in losses]
        self.replicas.record("gather", "loss", start, sum(map(num_bytes, here[1:])))
        return torch.stack(here).sum()


def part_of_batch(batch: TokenBatch, index: int, count: int) -> TokenBatch:
    """Return the sequences that replica `index` of `count` takes of a microbatch."""
    size = batch.num_sequences // count
    rows = slice(index * size, (index + 1) * size)

    def taken(tokens_N: torch.Tensor) -> torch.Tensor:
        return tokens_N.view(-1, batch.num_sequences)[:, rows].reshape(-1)

    return replace(
        batch,
        tokens_N=taken(batch.tokens_N),
        labels_N=taken(batch.labels_N),
        sample_ids_B=batch.sample_ids_B[rows],
        documents=None if batch.documents is None else batch.documents[rows],
        counted=None,
    )


class ThreadedExecutor(PipelineExecutor):
    """Run the microbatches of a step on all replicas, which get the parameters first."""

    def __init__(self, executor: PipelineExecutor, replicas: Replicas) -> None:
        """Take the place of the executor of the primary."""
        super().__init__(
            {0: ThreadedStage(replicas)},
            pp_rank=executor.pp_rank,
            groups=executor.groups,
            store=executor.store,
            stream=executor.stream,
        )
        self.replicas = replicas

    def run(
        self, schedule: Schedule, batches: Sequence[TokenBatch], scale: float
    ) -> dict[int, torch.Tensor]:
        """Run every action; return scale x the loss sum of each microbatch."""
        self.replicas.replicate()
        return super().run(schedule, batches, scale)


def with_replicas(
    plan: Plan, model: RankModel, groups: RankGroups, device: torch.device, pieces: PieceSizes
) -> RankModel:
    """Return a model as the primary of the plan's replicas; the others are built as it was."""
    alone = replace(plan, layout=replace(plan.layout, threads=Threads()))
    count = plan.layout.threads.replicas
    found: list[Replica] = []
    for index, place in enumerate(replica_devices(device, count)):
        here = model
        if index:
            # What it does is told by the primary's recorder.
            its_groups = rank_groups(alone, Recorder(groups.rank, NoEvents()))
            here = apply_plan(alone, its_groups, place, pieces=pieces, initial=False)
        (decoder,) = here.stages.values()
        found.append(
            Replica(
                index=index,
                device=place,
                decoder=decoder,
                buckets=here.buckets,
                store=here.store,
            )
        )
    replicas = Replicas(found, groups.recorder)
    dtype = TORCH_DTYPES[plan.mathematics.precision.reduction]
    model.reduction.then = partial(replicas.sum_gradients, dtype)
    executor = ThreadedExecutor(model.executor, replicas)
    return replace(model, executor=executor, replicas=replicas)
