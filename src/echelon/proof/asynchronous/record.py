# SPDX-License-Identifier: Apache-2.0
"""What each rank of an asynchronous proof does: its steps, at its own pace, and what it held then.

Workers wait a random while before each step, seeded by their rank, so that they do part.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Notes:
    """Keep what a rank does until it writes it down."""

    sent: Counter[str] = field(default_factory=Counter[str])
    samples: list[list[int]] = field(default_factory=list[list[int]])
    losses: list[float] = field(default_factory=list[float])
    held: Mapping[str, int] = field(default_factory=dict[str, int])

    def told(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "samples": self.samples,
            "losses": self.losses,
            "sent": dict(self.sent),
            "held": dict(self.held),
        }


def run_asynchronous(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Put one rank through the steps of `argument`, and write down what it says."""
    plan, folder = Plan.from_json(argument["plan"]), Path(argument["directory"])
    random = Random(f"{plan.mathematics.seed}-{context.rank}")
    subject: Any = find_factory(argument["subject"])(context, plan)
    server, steps = plan.mesh.is_server(context.rank), int(argument["num_steps"])
    notes = _Notes()
    try:
        for step in range(steps):
            if not server:
                time.sleep(random.uniform(0.0, LONGEST_PAUSE_S))
            report = subject.step(global_batch(plan, step), step)
            notes.sent.update(report.bytes_sent)
            notes.samples.append([int(i) for i in report.samples])
            notes.losses.append(sum(float(one) for one, _ in report.microbatch_losses.values()))
            notes.held = report.bytes_held
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
    }
    _write(folder, context.rank, told, pieces)


def _write(folder: Path, rank: int, told: Mapping[str, Any], pieces: Sequence[Shard]) -> None:
    stem = _stem(folder, rank)
    tensors = {str(place): one.tensor.clone() for place, one in enumerate(pieces)}
    save_file(tensors, stem.with_suffix(".safetensors"))
    stem.with_suffix(".json").write_text(json.dumps(told), encoding="utf-8")


def _stem(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}"


def read_rank(folder: Path, rank: int) -> AsynchronousRank:
    """Return what a rank wrote."""
    stem = _stem(folder, rank)
    told: dict[str, Any] = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    tensors = load_file(stem.with_suffix(".safetensors"))
    keys = ("worker", "step", "read", "version")
    applied = [dict(zip(keys, one, strict=True)) for one in told["applied"]]
    return AsynchronousRank(
        rank=rank,
        samples=dict(enumerate(told["samples"])),
        losses=dict(enumerate(told["losses"])),
        sent=told["sent"],
        held=told["held"],
        applied=[AppliedGradient(**one) for one in applied],
        pieces=[
            Piece(name=name, offset=tuple(offset), values=tensors[str(place)])
            for place, (name, offset) in enumerate(told["pieces"])
        ],
    )
