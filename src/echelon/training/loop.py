# SPDX-License-Identifier: Apache-2.0
"""The training loop of one rank, from first weights or a checkpoint to the last step.

Every rank runs this same loop; nothing in it depends on the layout. Ctrl-C and SIGTERM are agreed
on at a step boundary, so all ranks save the same step and stop.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from echelon.config.job import Job
from echelon.core.parameters import base_shape
from echelon.core.serialize import from_json
from echelon.launch.context import RankContext
from echelon.launch.handshake import check_same_state
from echelon.models.batch import TokenBatch
from echelon.parallel.offload.host_memory import make_copy_streams
from echelon.parallel.storage.weights import Shard
from echelon.parallel.transport.recorder import Recorder, clock_of
from echelon.training.checkpoint.communicator import run_on_all_ranks
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.data.batches import (
    BatchLayout,
    GlobalBatch,
    num_validation_batches,
    training_batch,
    validation_batch,
)
from echelon.training.data.feed import BatchFeed
from echelon.training.data.mixed_dataset import AnyDataset, open_data
from echelon.training.diagnosis import explain_not_finite
from echelon.training.engine import make_engine
from echelon.training.observer import Absence, ObserverFactory, RunObserver
from echelon.training.run_checkpoints import RunCheckpoints
from echelon.training.weights.adapters import find_adapters
from echelon.training.weights.files import WeightFiles, find_weights, require_optimizer
from echelon.training.weights.load import load_moments, load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """Hold what a rank is told: the job, where it writes, what it reads, who watches."""

    job: Job
    run_dir: str
    data: str
    observer: str
    resume: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """Say how a run ended, the same on every rank. `stopped`: before its last step, on request.

    Ranks that do not wait for each other have the loss of their own last step.

    A run that was validated once has that loss as its first and as its last.
    """

    steps: int
    stopped: bool
    loss: float | None
    first_validation: float | None
    last_validation: float | None
    num_validations: int
    checkpoint: str | None
    absences: tuple[Absence, ...] = ()
    """What lost ranks missed, where the run went on without them."""


class TrainLoop:
    """Train one rank's part of a job."""

    def __init__(self, context: RankContext, task: RankTask, observer: RunObserver) -> None:
        """Build the engine and map the data; every rank does so together."""
        job, plan = task.job, task.job.plan
        self.context, self.task, self.job, self.observer = context, task, job, observer
        self.layout = BatchLayout.from_plan(plan)
        dataset = open_data(task.data, train_on=job.data.train_on)
        dataset.check_vocabulary(plan.model.vocab)
        self.training: AnyDataset = dataset
        self.validation: AnyDataset = dataset
        if job.data.validation_fraction > 0:
            self.training, self.validation = dataset.split(job.data.validation_fraction)
        self.data_hash = dataset.index.hash
        self.identity = RunIdentity.from_plan(plan, dataset.index.tokenizer.hash)
        clock = clock_of(context.device)
        recorder = Recorder(context.rank, observer.sink, context.progress, clock)
        self.engine = make_engine(plan, recorder, context.device, pieces=context.pieces)
        self.engine.tokens_of_step = self.num_tokens
        self.exchange = self.engine.groups.everyone
        self.checkpoints = RunCheckpoints(
            job, Path(task.run_dir), self.engine, self.identity, self.data_hash
        )
        self.feed = BatchFeed(
            self.load,
            context.device,
            make_copy_streams(context.device),
            num_steps=job.train.steps,
        )
        self.saved: Path | None = None

    def run(self) -> TrainSummary | None:
        """Take the steps that are left, validate and save where the job says so.

        None of a rank that comes back when the run is over.
        """
        job, start = self.job, self._start()
        if start is None:
            return None
        step, stopped, loss, absences, parts = start, False, None, (), self.engine.parts
        first = last = self.validate(start) if job.train.validate_every != "never" else None
        num_validations = 0 if first is None else 1
        self.context.progress.answer_stop()
        while step < job.train.steps and not stopped:
            began = time.perf_counter()
            self.context.progress.mark(f"step {step + 1}")
            batches = self.feed.take(step)
            self.engine.on_launched = partial(self.feed.prepare, step + 1)
            asked = self.context.stop_requested()
            used = self.observer.used_bytes()
            result = self.engine.step(batches, step, stop_requested=asked, used_bytes=used)
            if self.engine.judges_step and not result.finite:
                raise explain_not_finite(self.engine, batches, step + 1, result)
            step, loss, stopped = result.step, result.loss, result.stop_requests > 0
            self._say_who_speaks(step)
            seconds = time.perf_counter() - began
            self.observer.stepped(replace(parts.facts(result), step_s=seconds))
            if job.train.validates_after(step) and not stopped:
                last, num_validations = self.validate(step), num_validations + 1
            if job.checkpoint.saves_after(step) or stopped or step == job.train.steps:
                self._save(step)
            for text in parts.news():
                self.observer.noted(step, text)
            if stopped or step == job.train.steps:
                loss = parts.mean_loss(result.loss, result.tokens)
                absences = tuple(parts.end(step))
        return TrainSummary(
            steps=step,
            stopped=stopped and step < job.train.steps,
            loss=loss,
            first_validation=first,
            last_validation=last,
            num_validations=num_validations,
            checkpoint=None if self.saved is None else str(self.saved),
            absences=absences,
        )

    def _start(self) -> int | None:
        """Be ready for the first step, and return the steps that are done.

        None on a rank that comes late, when the run is over.
        """
        engine, train = self.engine, self.job.train
        come_in = engine.parts.connect(self.context, train.step_timeout_s, train.steps)
        if come_in is not None:
            done = come_in()
            if done is not None:
                engine.refresh(slices=True)
            self.observer.speaks(False)
            return done
        step = self._begin()
        engine.parts.begin(step)
        self._say_who_speaks(step)
        return step

    def _say_who_speaks(self, step: int) -> None:
        """Let the observer know whether this rank tells of the run, where that may change."""
        now = self.engine.parts.speaks(step)
        if now is not None:
            self.observer.speaks(now)

    def _begin(self) -> int:
        """Start from the seed, a file or a checkpoint; return the steps that are done."""
        step, weights, pieces = 0, self.job.train.weights, self.context.pieces
        if self.task.resume is None and weights != "none":
            shape = base_shape(self.engine.plan.model)
            found = run_on_all_ranks(self.exchange, lambda: find_weights(Path(weights), shape))[0]
            # Tensors of parts that the file lacks begin as the seed says.
            of_parts = {
                name: shards
                for by_name in self.engine.parts.tensors().values()
                for name, shards in by_name.items()
                if name in found.sources
            }
            load_weights(found, {**of_parts, **self._held(found)}, self.exchange, pieces)
            self.engine.refresh()
            if self.job.train.weights_optimizer:
                step = require_optimizer(found, self.job)
                load_moments(found, self.engine.state(), self.exchange, pieces)
                self.engine.resume({**self.engine.position(), "num_updates": step})
            self.engine.parts.start_from_weights()
        elif self.task.resume is not None:
            step = self.checkpoints.load(Path(self.task.resume))
        if self.task.resume is None and self.job.train.adapters != "none":
            folder, shape = Path(self.job.train.adapters), self.engine.plan.model
            adapters = run_on_all_ranks(self.exchange, lambda: find_adapters(folder, shape))[0]
            load_weights(adapters, self._held(adapters), self.exchange, pieces)
            self.engine.refresh()
        mesh, engine = self.job.plan.mesh, self.engine
        if engine.parts.begins_together:
            labels = tuple(mesh.label(rank) for rank in range(mesh.world_size))
            check_same_state(self.context, digests(engine.shared_state()), labels)
        return step

    def _held(self, found: WeightFiles) -> dict[str, list[Shard]]:
        """Return what this rank holds of what files have; all else begins as the seed says."""
        held = self.engine.masters().items()
        return {name: shards for name, shards in held if name in found.sources}

    def load(self, step: int) -> list[TokenBatch]:
        """Read this rank's microbatches of a step into the memory of the host."""
        recorder = self.engine.groups.recorder
        start = recorder.now()
        batches = self._batches(self._global_batch(step), step=step)
        recorder.record("load", "batch", start=start)
        return batches

    def load_validation(self, number: int) -> list[TokenBatch]:
        """Read this rank's microbatches of a batch of validation."""
        return self._batches(self._validation_batch(number), step=0, train=False)

    def num_tokens(self, step: int) -> int:
        """Return the counted tokens of the global batch of a step, which no rank is asked for."""
        return self._global_batch(step).num_valid

    def _global_batch(self, step: int) -> GlobalBatch:
        seed, end = self.job.plan.mathematics.seed, self.job.data.epoch_end
        return training_batch(self.training, self.layout, seed=seed, step=step, epoch_end=end)

    def _validation_batch(self, number: int) -> GlobalBatch:
        return validation_batch(self.validation, self.layout, batch=number)

    def _batches(self, batch: GlobalBatch, *, step: int, train: bool = True) -> list[TokenBatch]:
        """Return this rank's part of a global batch, in the memory of the host."""
        made: list[TokenBatch] = []
        for index in range(self.layout.num_microbatches if self.engine.computes else 0):
            rows = batch.microbatch(dp_rank=self.engine.data_rank, microbatch=index)
            whole = TokenBatch.from_rows(
                torch.from_numpy(rows.inputs_BT),
                torch.from_numpy(rows.labels_BT),
                torch.from_numpy(rows.sample_ids_B),
                step=step,
                seed=self.job.plan.mathematics.seed,
                train=train,
            )
            runs = self.engine.runs_for(whole.whole_length)
            made.append(whole.cut(runs, rows.documents))
        return made

    def validate(self, step: int) -> float:
        """Return the mean loss over the tokens of the validation batches."""
        self.context.progress.mark(f"validation after step {step}")
        self.engine.begin_validation(step)
        wanted = self.job.train.validation_batches
        total = tokens = 0.0
        for index in range(min(wanted, num_validation_batches(self.validation, self.layout))):
            batch = self._validation_batch(index)
            batches = self._batches(batch, step=step, train=False)
            loss = self.engine.evaluate([one.to(self.context.device) for one in batches])
            total, tokens = total + loss * batch.num_valid, tokens + batch.num_valid
        self.observer.validated(step, total / max(1.0, tokens))
        return total / max(1.0, tokens)

    def _save(self, step: int) -> None:
        self.context.progress.mark(f"checkpoint after step {step}")
        self.saved = self.checkpoints.save(step)
        self.observer.saved(step, self.saved)


def train_rank(context: RankContext, argument: Any) -> TrainSummary | None:
    """Train one rank of the task that `argument` holds as JSON: what a launcher calls."""
    task = from_json(RankTask, argument)
    module, _, name = task.observer.partition(":")
    factory = cast(ObserverFactory, getattr(importlib.import_module(module), name))
    observer = factory(task.job, Path(task.run_dir), context.rank)
    try:
        loop = TrainLoop(context, task, observer)
        try:
            summary = loop.run()
            if summary is not None:
                # What the last update sends must arrive before this rank ends.
                loop.engine.finish()
            return summary
        finally:
            loop.engine.close()
    finally:
        observer.close()


def digests(parameters: Mapping[str, list[Shard]]) -> dict[str, str]:
    """Return a hash of each piece of a parameter; ranks that hold the same piece must agree."""
    found: dict[str, str] = {}
    for name, shards in parameters.items():
        for shard in shards:
            data = shard.tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
            place = ",".join(str(start) for start in shard.offset)
            found[f"{name}[{place}]"] = hashlib.blake2b(data, digest_size=8).hexdigest()
    return found
