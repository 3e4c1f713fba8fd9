# SPDX-License-Identifier: Apache-2.0
"""A worker that waits for servers only, and for other workers as far as the bound says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from echelon.models.batch import TokenBatch
from echelon.parallel.rank_model import GradientExchange
from echelon.parallel.servers.messages import ASKS_TO_STOP, WorkerMessages
from echelon.parallel.servers.worker import PulledParameters
from echelon.training.optimizer import sum_of_squares
from echelon.training.optimizer.step import learning_rate
from echelon.training.servers.synchronous import ServedWorker
from echelon.training.steps.part import StepResult


class AsynchronousWorker(ServedWorker):
    """Take steps against servers that update with each push by itself, or with all of a step."""

    judges_step: ClassVar[bool] = False
    exchange: ClassVar[GradientExchange] = GradientExchange(
        reduction=WorkerMessages, gathering=PulledParameters
    )

    def __init__(self, *args: Any, **named: Any) -> None:
        """Build the worker as any rank is built."""
        super().__init__(*args, **named)
        assert isinstance(self.model.reduction, WorkerMessages), "it pushes to servers"
        self.messages = self.model.reduction
        self._stop_after = 0

    def step(
        self,
        batches: Sequence[TokenBatch],
        step: int,
        *,
        stop_requested: bool = False,
        used_bytes: int = 0,
    ) -> StepResult:
        """Compute a gradient of this worker's microbatches, push it, and pull parameters.

        A push that is an update of its own is W times this worker's part of the gradient of the
        global batch: what the mean over that batch is expected to be. Of a bound of 0 it is the
        part alone, and servers add up all parts, as synchronous ones do.
        """
        self.groups.recorder.waited_s = 0.0
        model, tokens = self.model, self.tokens_of_step(step)
        workers, updates = self.plan.mesh.num_workers, self.plan.mathematics.updates
        times = updates.per_clock(workers)
        scale = times / max(1, tokens)
        model.store.start_step()
        model.reduction.start_step()
        self.messages.begin(step, tokens)
        losses = self._run(batches, scale)
        model.reduction.finish()
        if self.on_launched is not None:
            self.on_launched()
        if self.on_gradients is not None:
            self.on_gradients()
        squares = sum_of_squares(
            model.buckets, lambda _: True, run_elements=self._pieces.norm_elements
        )
        values = torch.stack(list(losses.values()))
        own = float(values.sum().double())
        asks = ASKS_TO_STOP if stop_requested else 0
        self.messages.end(own, float(squares), self._stop_after or asks)
        answers = self.messages.pull(model.buckets)
        self._stop_after = self._stop_after or answers[0].stop_after
        self.num_updates += times
        self.groups.recorder.settle()
        return StepResult(
            step=step + 1,
            loss=answers[0].loss,
            tokens=tokens,
            grad_norm=float(squares) ** 0.5,
            learning_rate=learning_rate(self.plan.mathematics.optimizer, step),
            loss_scale=1.0,
            skipped=False,
            stop_requests=int(self._stop_after == step + 1),
            rank_waits_s=(),
            rank_used_bytes=(used_bytes,),
            microbatch_losses={
                (self.data_rank, index): (float(value) / scale, batches[index].num_valid())
                for index, value in zip(losses, values, strict=True)
            },
        )

    def begin_validation(self, step: int) -> None:
        """Pull the parameters with the pushes of all workers in them: those a checkpoint has."""
        self.messages.pull_newest(self.model.buckets, step)

    def resume(self, position: Any) -> None:
        """Go on from `position`."""
        super().resume(position)
        self.messages.versions = [self.num_updates] * self.plan.mesh.servers

    def close(self) -> None:
        """Tell the servers that no step follows."""
        self.messages.leave()
        super().close()
