# SPDX-License-Identifier: Apache-2.0
"""What each rank does in a run that loses an island, and what it held at each meeting.

The last rank of the last island is killed in the middle of a meeting: when it has begun to send,
and ranks of other places may have all that they need. The others go on; at the end of the next
round they wait for it at the door, where it is to come back.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.storage.weights import Shard
from echelon.proof.oracle.batches import global_batch
from echelon.proof.ranks import find_factory

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
    """Hold a rectangle of a tensor that a rank has at the end of a meeting."""

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


def run_with_a_loss(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Put one rank through the steps of `argument`, and write down what it says at meetings."""
    plan, folder = Plan.from_json(argument["plan"]), Path(argument["directory"])
    local, steps = plan.mathematics.local_sgd, int(argument["num_steps"])
    subject: Any = find_factory(argument["subject"])(context, plan)
    last_of_all = context.rank == plan.mesh.world_size - 1
    notes = _Notes(folder, context, subject)
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


class _Notes:
    """Keep what a rank does until the next meeting."""

    def __init__(self, folder: Path, context: RankContext, subject: Any) -> None:
        self._stem = folder / f"rank-{context.rank:04d}-{context.attempt}"
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
            "pieces": [[kind, name, list(shard.offset)] for kind, name, shard in pieces],
        }
        stem = Path(f"{self._stem}-{done:06d}")
        tensors = {str(at): one.tensor.detach().clone() for at, (_, _, one) in enumerate(pieces)}
        save_file(tensors, stem.with_suffix(".safetensors"))
        # Last, and at once: who is killed leaves a whole record or none.
        part = stem.with_suffix(".part")
        part.write_text(json.dumps(told), encoding="utf-8")
        part.rename(stem.with_suffix(".json"))
        self._losses.clear()
        self._samples.clear()
        self._sent.clear()


def read_records(folder: Path) -> tuple[MeetingRecord, ...]:
    """Return what all ranks wrote, by steps done, then by rank."""
    found: list[MeetingRecord] = []
    for path in sorted(folder.glob("rank-*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(path.with_suffix(".safetensors"))
        found.append(
            MeetingRecord(
                **{key: told[key] for key in ("rank", "attempt", "step", "tries", "came_in")},
                members=tuple(told["members"]),
                joins=tuple(told["joins"]),
                losses={step: loss for step, loss in told["losses"]},
                samples={step: ids for step, ids in told["samples"]},
                sent=told["sent"],
                pieces=tuple(
                    HeldPiece(
                        kind=kind, name=name, offset=tuple(offset), values=tensors[str(place)]
                    )
                    for place, (kind, name, offset) in enumerate(told["pieces"])
                ),
            )
        )
    return tuple(sorted(found, key=lambda one: (one.step, one.rank, one.attempt)))
