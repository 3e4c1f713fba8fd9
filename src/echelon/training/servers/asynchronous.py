# SPDX-License-Identifier: Apache-2.0
"""Asynchronous parameter servers: a worker that pushes and goes on, a server that applies pushes.

A worker waits for servers only, and for other workers as far as the bound says. A server applies
pushes as they come: a thread for each worker, and one update at a time. The step of its training
loop is one of all workers: it ends when each of them has done it. So validation and checkpoints
between steps find every worker at the same place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isfinite
from threading import Thread
from typing import Any, ClassVar

import torch

from echelon.core.choices.updates import AppliedGradient
from echelon.core.errors import RunFailed
from echelon.core.event import APPLY, Event
from echelon.core.plan import Plan
from echelon.core.rulebook.run import LOSS_NOT_FINITE
from echelon.models.batch import TokenBatch
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.rank_model import GradientExchange
from echelon.parallel.servers import (
    ASKS_FOR_PARAMETERS,
    ASKS_TO_STOP,
    BEGIN,
    END,
    FIRST_BUCKET,
    LEAVES,
    WORKER,
    PulledParameters,
    WorkerMessages,
    receive_numbers,
    send_numbers,
)
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group
from echelon.training.engine import TrainEngine
from echelon.training.optimizer import local_norm_squared, sum_of_squares
from echelon.training.optimizer.step import learning_rate
from echelon.training.servers.served import Answer, Push, Served
from echelon.training.servers.synchronous import ParameterServer, ServedWorker
from echelon.training.steps.part import StepResult

ENDS_WITHIN_S = 10.0
"""How long a server that ends waits for its workers to say that no step follows."""


class AsynchronousServer(ParameterServer):
    """Hold a server's ranges, and update them with what each worker pushes."""

    judges_step: ClassVar[bool] = False

    def __init__(self, *args: Any, **named: Any) -> None:
        """Build the server as any rank is built; its threads begin with the first step."""
        super().__init__(*args, **named)
        mesh = self.plan.mesh
        pairs = self.groups.server_links.pairs
        self._pairs = [pairs[rank] for rank in range(mesh.num_workers) if rank in pairs]
        self._threads: list[Thread] = []
        self.served = Served(
            updates=self.plan.mathematics.updates,
            clocks=[0] * mesh.num_workers,
            update=self._apply,
            snapshot=self._snapshot,
            decides=self.groups.rank == mesh.server_ranks[0],
        )
        self.keeps_order = False
        self._order: list[AppliedGradient] = []
        self._wire = TORCH_DTYPES[self.plan.mathematics.precision.reduction]
        self._quiet_events: deque[Event] = self.groups.server_links.events

    @property
    def applied(self) -> Sequence[AppliedGradient]:
        """Return every gradient that was applied, in order: where `keeps_order` is set."""
        return self._order

    def step(
        self,
        batches: Sequence[TokenBatch],
        step: int,
        *,
        stop_requested: bool = False,
        used_bytes: int = 0,
    ) -> StepResult:
        """Return when every worker has done step `step`."""
        del batches
        recorder, served = self.groups.recorder, self.served
        if not self._threads:
            served.clocks = [step] * self.plan.mesh.num_workers
            self._start()
        if stop_requested:
            served.request_stop()
        with recorder.waiting(f"pushes of step {step + 1}"):
            served.wait_for(step + 1)
        self._tell()
        workers, updates = self.plan.mesh.num_workers, self.plan.mathematics.updates
        self.num_updates += updates.per_clock(workers)
        loss = served.losses[step] / updates.per_clock(workers)
        # A thread may still answer a push of this step.
        served.losses.pop(step - 1, None)
        return StepResult(
            step=step + 1,
            loss=loss,
            tokens=served.tokens.pop(step),
            grad_norm=0.0,
            learning_rate=learning_rate(self.plan.mathematics.optimizer, step),
            loss_scale=1.0,
            skipped=False,
            stop_requests=int(served.stop_after == step + 1),
            rank_waits_s=(),
            rank_used_bytes=(used_bytes,),
            microbatch_losses={},
        )

    def resume(self, position: Any) -> None:
        """Go on from `position`."""
        super().resume(position)
        self.served.version = self.num_updates

    def close(self) -> None:
        """Wait for workers to leave, as long as that may take."""
        for thread in self._threads:
            thread.join(timeout=ENDS_WITHIN_S)
        self._tell()
        super().close()

    def _start(self) -> None:
        for worker, pair in enumerate(self._pairs):
            thread = Thread(target=self._serve, args=(worker, pair), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, worker: int, pair: Group) -> None:
        """Take the pushes of one worker until it leaves."""
        try:
            while (asked := self._receive(worker, pair)) is not None:
                if isinstance(asked, Push):
                    self._answer(pair, self.served.take(asked))
                else:
                    self._answer(pair, self.served.newest(asked))
        except BaseException as error:  # the main thread raises it
            self.served.fail(error)

    def _receive(self, worker: int, pair: Group) -> Push | int | None:
        """Return a push, or the steps after which the newest is asked for; None at the end."""
        step, version, tokens = receive_numbers(pair, WORKER, BEGIN)
        if step == LEAVES:
            return None
        if step == ASKS_FOR_PARAMETERS:
            return int(version)
        received = [
            torch.empty_like(bucket.gradient_slice, dtype=self._wire)
            for bucket in self.model.buckets
        ]
        arriving = [
            pair.receive(one, WORKER, name=f"gradients.{bucket.name}", tag=_tag(bucket))
            for bucket, one in zip(self.model.buckets, received, strict=True)
            if one.numel()
        ]
        loss, norm_squared, stop_after = receive_numbers(pair, WORKER, END)
        for pending in arriving:
            pending.wait()
        return Push(
            worker=worker,
            step=int(step),
            version=int(version),
            tokens=int(tokens),
            gradients=received,
            loss=loss,
            norm_squared=norm_squared,
            stop_after=int(stop_after),
        )

    def _answer(self, pair: Group, answer: Answer) -> None:
        sends = [
            pair.send(values, WORKER, name=f"parameters.{bucket.name}", tag=_tag(bucket))
            for bucket, values in zip(self.model.buckets, answer.values, strict=True)
            if values.numel()
        ]
        sends.append(
            send_numbers(pair, WORKER, END, answer.version, answer.loss, answer.stop_after)
        )
        for pending in sends:
            pending.wait()

    def _snapshot(self) -> list[torch.Tensor]:
        return [bucket.value_slice.clone() for bucket in self.model.buckets]

    def _apply(self, pushes: Sequence[Push], staleness: int) -> None:
        """Update this server's ranges with the sum of pushes, in the order of workers."""
        numbers = self.plan.mathematics
        for place, bucket in enumerate(self.model.buckets):
            total, *others = [push.gradients[place] for push in pushes]
            for one in others:
                total.add_(one)
            bucket.gradient_slice.copy_(total)
        norm = self._norm(pushes)
        if not isfinite(norm):
            who = " and ".join(str(one.worker) for one in pushes)
            raise RunFailed(
                LOSS_NOT_FINITE.problem(
                    f"step {pushes[-1].step + 1}: the gradient of worker {who} has norm {norm}; "
                    f"the parameters are those of version {self.served.version}",
                    suggestions=("a lower optimizer.learning_rate", "more optimizer.warmup_steps"),
                )
            )
        clip, factor = numbers.optimizer.clip_norm, 1.0
        if clip is not None and norm > clip:
            factor = clip / norm
        rate = learning_rate(numbers.optimizer, pushes[-1].step)
        rate = numbers.updates.damped_rate(rate, staleness)
        self.optimizer.update(rate, factor, lambda _: None)

    def _norm(self, pushes: Sequence[Push]) -> float:
        """Return the norm of the whole gradient: a worker knows that of its own push.

        Of a sum of pushes, each server has that of its ranges, and they add up what they have.
        """
        if self.plan.mathematics.updates.applies_each:
            return pushes[0].norm_squared ** 0.5
        mine = local_norm_squared(
            self.model.buckets, lambda _: True, run_elements=self.pieces.norm_elements
        )
        row = torch.tensor([mine], dtype=torch.float64)
        rows = self.groups.server_peers.gather_rows(row, name="norms of servers")
        # As synchronous servers add them up: in a row of all ranks, of which workers have zeros.
        every = torch.zeros(self.plan.mesh.world_size, 1, dtype=torch.float64)
        every[self.plan.mesh.num_workers :] = rows
        return float(every.sum(0)[0].sqrt())

    def _tell(self) -> None:
        """Write down what threads have sent and applied since the last step."""
        sink = self.groups.recorder.sink
        while self._quiet_events:
            sink.record(self._quiet_events.popleft())
        now = self.groups.recorder.now()
        while self.served.applied:
            one = self.served.applied.popleft()
            sink.record(
                Event(kind=APPLY, name=one.event_name, start=now, end=now, rank=self.groups.rank)
            )
            if self.keeps_order:
                self._order.append(one)


def _tag(bucket: Bucket) -> int:
    return FIRST_BUCKET + bucket.index


class AsynchronousWorker(ServedWorker):
    """Take steps against servers that update with each push by itself, or with all of a step."""

    judges_step: ClassVar[bool] = False
    exchange: ClassVar[GradientExchange] = GradientExchange(
        reduction=WorkerMessages, gathering=PulledParameters
    )

    def __init__(self, *args: Any, **named: Any) -> None:
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
            model.buckets, lambda _: True, run_elements=self.pieces.norm_elements
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


def engine_of(plan: Plan, rank: int) -> type[TrainEngine] | None:
    """Return the class of the engine of a rank; None in a run without servers."""
    updates, is_server = plan.mathematics.updates, plan.mesh.is_server(rank)
    if not plan.mesh.servers:
        return None
    if updates.is_asynchronous:
        return AsynchronousServer if is_server else AsynchronousWorker
    return ParameterServer if is_server else ServedWorker
