# SPDX-License-Identifier: Apache-2.0
"""What each rank of an asynchronous proof does: its steps, at its own pace, and what it held then.

Workers wait a random while before each step, seeded by their rank, so that they do part. Where the
run is to go on without a lost worker the last one is killed in the middle of a push, and comes back
if it may: the others give it time.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from echelon.core.choices.updates import AppliedGradient, WorkerChange
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.weights import Shard
from echelon.proof.oracle.batches import global_batch
from echelon.proof.ranks import find_factory

LONGEST_PAUSE_S = 0.03
"""The longest wait of a worker before a step."""

KILLED_IN_STEP = 2
"""The step, from 0, in which a worker is killed."""

STARTS_WITHIN_S = 60.0
"""How long the others wait for it to be started again."""

COMES_WITHIN_S = 0.3
"""How long the others wait before each step for it to be taken in, once it was."""

_STARTED, _BACK = "started again", "taken in again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Hold a rectangle of a parameter that a server has after the last step."""

    name: str
    offset: tuple[int, ...]
    values: torch.Tensor

    @property
    def region(self) -> tuple[slice, ...]:
        """Return where it lies in the whole."""
        pairs = zip(self.offset, self.values.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousRank:
    """Hold what one rank says of a run."""

    rank: int
    """The rank."""
    samples: Mapping[int, Sequence[int]]
    """Ids of the samples that it read, by step."""
    losses: Mapping[int, float]
    """Sum of the losses of its tokens, by step."""
    sent: Mapping[str, int]
    """Bytes that it sent in all steps, by axis."""
    held: Mapping[str, int]
    """Bytes that it holds, by kind."""
    applied: Sequence[AppliedGradient]
    """The gradients that it applied, in order: none of a worker."""
    pieces: Sequence[Piece]
    """What it has of the parameters: nothing of a worker."""
    changes: Sequence[WorkerChange] = ()
    """Who came and was lost, on a server of a run that goes on without."""


@dataclass(slots=True)
class _Notes:
    """Keep what a rank does until it writes it down."""

    first: int = 0
    sent: Counter[str] = field(default_factory=Counter[str])
    samples: list[list[int]] = field(default_factory=list[list[int]])
    losses: list[float] = field(default_factory=list[float])
    held: Mapping[str, int] = field(default_factory=dict[str, int])

    def told(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "first": self.first,
            "samples": self.samples,
            "losses": self.losses,
            "sent": dict(self.sent),
            "held": dict(self.held),
        }


def run_asynchronous(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Put one rank through the steps of `argument`, and write down what it says."""
    plan, folder = Plan.from_json(argument["plan"]), Path(argument["directory"])
    random = Random(f"{plan.mathematics.seed}-{context.rank}-{context.attempt}")
    subject: Any = find_factory(argument["subject"])(context, plan)
    server, steps = plan.mesh.is_server(context.rank), int(argument["num_steps"])
    elastic, notes = _Loss(context, plan), _Notes()
    try:
        if elastic.active:
            elastic.started()
            notes.first = subject.begin(context, steps)
            elastic.back()
        for step in range(notes.first, steps):
            if not server:
                time.sleep(random.uniform(0.0, LONGEST_PAUSE_S))
                elastic.give_time(step)
            if elastic.is_killed_in(step):
                _write(folder, context, notes.told(), ())
                subject.die_when_pushed()
            report = subject.step(global_batch(plan, step), step)
            notes.sent.update(report.bytes_sent)
            notes.samples.append([int(i) for i in report.samples])
            notes.losses.append(sum(float(one) for one, _ in report.microbatch_losses.values()))
            notes.held = report.bytes_held
            if elastic.active:
                subject.go_on(step + 1)
    finally:
        after = subject.close()
    if server:
        notes.sent.update(after)  # the last answers of its threads; a worker takes its leave
    pieces = [
        shard for shards in (subject.parameters() if server else {}).values() for shard in shards
    ]
    told = {
        **notes.told(),
        "applied": [[one.worker, one.step, one.read, one.version] for one in subject.applied()],
        "pieces": [[piece.name, list(piece.offset)] for piece in pieces],
        "changes": [asdict(one) for one in (subject.changes() if elastic.active else ())],
    }
    _write(folder, context, told, pieces)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Say what a rank does for the worker that is killed: the last one, once."""

    context: RankContext
    plan: Plan

    @property
    def active(self) -> bool:
        """Return whether the run goes on without a lost worker."""
        return self.plan.mathematics.updates.is_elastic

    def is_killed_in(self, step: int) -> bool:
        """Return whether this rank is killed in a step."""
        last = self.context.rank == self.plan.mesh.num_workers - 1
        return self.active and last and not self.context.attempt and step == KILLED_IN_STEP

    def started(self) -> None:
        """Say that this rank was started again, if so, and is about to come."""
        if self.context.attempt:
            self.context.store.set(_STARTED, "1")

    def back(self) -> None:
        """Say that this rank was taken in again, if so."""
        if self.context.attempt:
            self.context.store.set(_BACK, "1")

    def give_time(self, step: int) -> None:
        """Wait before a step for the one that was lost, where it is to come back."""
        if self.active and step > KILLED_IN_STEP and self.plan.mathematics.updates.restarts:
            self._wait(_STARTED, STARTS_WITHIN_S)
            self._wait(_BACK, COMES_WITHIN_S)

    def _wait(self, key: str, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not self.context.store.check([key]) and time.monotonic() < until:
            time.sleep(0.02)


def _write(
    folder: Path, context: RankContext, told: Mapping[str, Any], pieces: Sequence[Shard]
) -> None:
    stem = _stem(folder, context.rank, context.attempt)
    tensors = {str(place): one.tensor.clone() for place, one in enumerate(pieces)}
    save_file(tensors, stem.with_suffix(".safetensors"))
    stem.with_suffix(".json").write_text(json.dumps(told), encoding="utf-8")


def _stem(folder: Path, rank: int, attempt: int) -> Path:
    return folder / f"rank-{rank:04d}-{attempt}"


def read_rank(folder: Path, rank: int) -> AsynchronousRank:
    """Return what a rank wrote; one that was started again, both times together."""
    told: dict[str, Any] = {}
    samples: dict[int, Sequence[int]] = {}
    losses: dict[int, float] = {}
    attempt = 0
    while (stem := _stem(folder, rank, attempt)).with_suffix(".json").exists():
        told = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        samples |= dict(enumerate(told["samples"], start=told["first"]))
        losses |= dict(enumerate(told["losses"], start=told["first"]))
        attempt += 1
    tensors = load_file(_stem(folder, rank, attempt - 1).with_suffix(".safetensors"))
    keys = ("worker", "step", "read", "version")
    applied = [dict(zip(keys, one, strict=True)) for one in told.get("applied", ())]
    return AsynchronousRank(
        rank=rank,
        samples=samples,
        losses=losses,
        sent=told["sent"],
        held=told["held"],
        applied=[AppliedGradient(**one) for one in applied],
        pieces=[
            Piece(name=name, offset=tuple(offset), values=tensors[str(place)])
            for place, (name, offset) in enumerate(told.get("pieces", ()))
        ],
        changes=[WorkerChange(**one) for one in told.get("changes", ())],
    )
