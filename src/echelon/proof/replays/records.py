# SPDX-License-Identifier: Apache-2.0
"""What each rank of a replayed run does, and what it writes down: its steps, and what it held.

Asynchronous workers wait a random while before each step, seeded by their rank, so that they do
part. In a run that loses an island the last rank of the last island is killed in the middle of a
meeting: when it has begun to send, and ranks of other places may have all that they need. The
others go on; at the end of the next round they wait for it at the door, where it is to come back.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from echelon.core.choices.updates import AppliedGradient
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.storage.weights import Shard
from echelon.proof.oracle.batches import global_batch
from echelon.proof.ranks import find_factory

LONGEST_PAUSE_S = 0.03
"""The longest wait of a worker before a step."""

REPLAY_TOLERANCE = 1e-10
"""Relative, in float64, of a replay: sums are taken in another order, over a few steps."""

EXPLAINED = 1e-8
"""What a mistake may leave unexplained, relative: others leave far more."""

LOST_IN_ROUND = 2
"""The round, from 1, in whose meeting an island is lost: there is momentum before it."""

BACK_IN_ROUND = 3
"""The round at whose end it is waited for."""

NUM_ROUNDS = 5
"""How many there are: momentum that was given is used in those after."""

COMES_WITHIN_S = 90.0
"""How long the others wait for an island to be started again."""

VALUES, PARAMETERS, MOMENTUM = "values", "outer.parameters", "outer.momentum"
"""Kinds of tensors that are written down: what the inner optimizer keeps, what islands agree on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """Hold a rectangle of a tensor that a rank has at the end of a meeting, or of a run."""

    kind: str
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
    pieces: Sequence[HeldPiece]
    """What it has of the parameters: nothing of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingRecord:
    """Hold what a rank says when a meeting is over."""

    rank: int
    """The rank."""
    attempt: int
    """How often it was started again."""
    step: int
    """Steps that are done."""
    members: tuple[int, ...]
    """The islands that met."""
    joins: tuple[int, ...]
    """Those that came in at its end."""
    tries: int
    """How often the meeting did not count before."""
    came_in: bool
    """Whether this rank came in here, and did not meet."""
    losses: Mapping[int, float]
    """The mean loss of each step of its island since the meeting before."""
    samples: Mapping[int, Sequence[int]]
    """Ids of the samples that it read in them."""
    sent: int
    """Bytes that it sent to other islands."""
    pieces: tuple[HeldPiece, ...]
    """What it has."""


def _write(stem: Path, told: Mapping[str, Any], held: Sequence[tuple[str, str, Shard]]) -> None:
    """Write values, and tensors by kind and name: who is killed leaves a whole record or none."""
    pieces = [[kind, name, list(shard.offset)] for kind, name, shard in held]
    tensors = {str(at): one.tensor.detach().clone() for at, (_, _, one) in enumerate(held)}
    save_file(tensors, stem.with_suffix(".safetensors"))
    part = stem.with_suffix(".part")
    part.write_text(json.dumps({**told, "pieces": pieces}), encoding="utf-8")
    part.rename(stem.with_suffix(".json"))


def _read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    tensors = load_file(path.with_suffix(".safetensors"))
    told["pieces"] = tuple(
        HeldPiece(kind=kind, name=name, offset=tuple(offset), values=tensors[str(place)])
        for place, (kind, name, offset) in enumerate(told["pieces"])
    )
    return told


def run_asynchronous(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Put one rank through the steps of `argument`, and write down what it says."""
    plan, folder = Plan.from_json(argument["plan"]), Path(argument["directory"])
    random = Random(f"{plan.mathematics.seed}-{context.rank}")
    subject: Any = find_factory(argument["subject"])(context, plan)
    server = plan.mesh.is_server(context.rank)
    sent, samples, losses, held = Counter[str](), list[list[int]](), list[float](), {}
    try:
        for step in range(int(argument["num_steps"])):
            if not server:
                time.sleep(random.uniform(0.0, LONGEST_PAUSE_S))
            report = subject.step(global_batch(plan, step), step)
            sent.update(report.bytes_sent)
            samples.append([int(i) for i in report.samples])
            losses.append(sum(float(one) for one, _ in report.microbatch_losses.values()))
            held = dict(report.bytes_held)
    finally:
        after = subject.close()
    if server:
        sent.update(after)  # the last answers of its threads; a worker takes its leave
    told = {
        "samples": samples,
        "losses": losses,
        "sent": dict(sent),
        "held": held,
        "applied": [[one.worker, one.step, one.read, one.version] for one in subject.applied()],
    }
    parameters = subject.parameters() if server else {}
    pieces = [("parameters", one.name, one) for shards in parameters.values() for one in shards]
    _write(_stem(folder, context.rank), told, pieces)


def _stem(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}"


def read_rank(folder: Path, rank: int) -> AsynchronousRank:
    """Return what a rank wrote."""
    told = _read(_stem(folder, rank).with_suffix(".json"))
    keys = ("worker", "step", "read", "version")
    applied = [dict(zip(keys, one, strict=True)) for one in told["applied"]]
    return AsynchronousRank(
        rank=rank,
        samples=dict(enumerate(told["samples"])),
        losses=dict(enumerate(told["losses"])),
        sent=told["sent"],
        held=told["held"],
        applied=[AppliedGradient(**one) for one in applied],
        pieces=told["pieces"],
    )


def run_with_a_loss(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Put one rank through the steps of `argument`, and write down what it says at meetings."""
    plan, folder = Plan.from_json(argument["plan"]), Path(argument["directory"])
    local, steps = plan.mathematics.local_sgd, int(argument["num_steps"])
    subject: Any = find_factory(argument["subject"])(context, plan)
    last_of_all = context.rank == plan.mesh.world_size - 1
    notes = _MeetingNotes(folder, context, subject)
    try:
        done = subject.begin(context, steps)
        if context.attempt and done < steps:
            notes.write(done, came_in=True)
        if last_of_all and not context.attempt:
            subject.die_at_meeting(LOST_IN_ROUND * local.every)
        if local.restarts:
            back_at = BACK_IN_ROUND * local.every
            subject.wait_for_return(back_at, local.islands, COMES_WITHIN_S)
        for step in range(done, steps):
            report = subject.step(global_batch(plan, step), step)
            notes.take(step, report)
            if subject.met(step + 1) is not None:
                notes.write(step + 1)
    finally:
        subject.close()


class _MeetingNotes:
    """Keep what a rank does until the next meeting."""

    def __init__(self, folder: Path, context: RankContext, subject: Any) -> None:
        self._stem = f"{_stem(folder, context.rank)}-{context.attempt}"
        self._context, self._subject = context, subject
        self._losses: dict[int, float] = {}
        self._samples: dict[int, list[int]] = {}
        self._sent: Counter[str] = Counter()

    def take(self, step: int, report: Any) -> None:
        """Note one step."""
        self._losses[step] = float(report.loss)
        self._samples[step] = [int(one) for one in report.samples]
        self._sent.update(report.bytes_sent)

    def write(self, done: int, *, came_in: bool = False) -> None:
        """Write down a meeting."""
        members, joins, tries = self._subject.met(done)
        held: dict[str, Mapping[str, Sequence[Shard]]] = {
            VALUES: self._subject.masters(),
            **self._subject.step_parts(),
        }
        pieces = [
            (kind, name, shard)
            for kind, shards in held.items()
            for name, every in shards.items()
            for shard in every
        ]
        told = {
            "rank": self._context.rank,
            "attempt": self._context.attempt,
            "step": done,
            "members": members,
            "joins": joins,
            "tries": tries,
            "came_in": came_in,
            "losses": list(self._losses.items()),
            "samples": list(self._samples.items()),
            "sent": self._sent["dp_replicate"],
        }
        _write(Path(f"{self._stem}-{done:06d}"), told, pieces)
        self._losses.clear()
        self._samples.clear()
        self._sent.clear()


def read_records(folder: Path) -> tuple[MeetingRecord, ...]:
    """Return what all ranks wrote, by steps done, then by rank."""
    found: list[MeetingRecord] = []
    for path in sorted(folder.glob("rank-*.json")):
        told = _read(path)
        told.update((key, tuple(told[key])) for key in ("members", "joins"))
        told.update((key, dict(told[key])) for key in ("losses", "samples"))
        found.append(MeetingRecord(**told))
    return tuple(sorted(found, key=lambda one: (one.step, one.rank, one.attempt)))
