# SPDX-License-Identifier: Apache-2.0
"""events.jsonl.gz: what a rank sent and ran, one `Event` to a line, and which steps it writes.

Rank 0 writes events.jsonl.gz and rank 1 events.rank-0001.jsonl.gz: ranks on several machines cannot
append to one file. Earlier versions wrote events.jsonl, which is read, too. Each start of a run
begins with an event of kind "start" whose name is the time of day; the seconds of the events that
follow count from there. A step ends with an event of kind "step" whose name, its mark, is the same
in the files of all ranks and in metrics.jsonl. Each step is a separate gzip member, so a killed
run leaves whole steps.

A long run leaves steps out, so that its events stay within a budget of bytes. An event of kind
"sampled" names the steps that are written from there on. A rank writes the first steps, the last
step, steps after which the run saves or validates, and every k-th of the other steps. k is a power
of two. It doubles when the remaining steps, at the mean size of the written steps, would exceed the
budget. Steps that a rank writes with a large k are also written by ranks with a smaller k, so all
ranks have common steps without a message. Local SGD sends different bytes in the steps of a round,
so its rounds are written whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from echelon.config.job import Job
from echelon.core.event import LOST, MEET, THERE, Event
from echelon.core.serialize import content_hash
from echelon.telemetry.json_lines import JsonLines

START, STEP, SAMPLED = "start", "step", "sampled"
METRICS_FILE = "metrics.jsonl"
"""What rank 0 writes of every step, with the same marks."""

_OF_ALL_STEPS = frozenset({START, SAMPLED, LOST, THERE, MEET})
"""Rare kinds, which are also written of steps that are left out."""
DECIMALS = 7
"""Decimals of seconds; further digits are noise of clocks, which does not compress."""

_OF_A_RANK = re.compile(r"events\.rank-(\d{4,})\.jsonl(\.gz)?", re.ASCII)

WARM_UP = 8
"""First steps of a start of a run, all of which are written."""


def events_path(run_dir: Path, rank: int) -> Path:
    """Return where a rank writes its events."""
    return run_dir / f"{_stem(rank)}.jsonl.gz"


def events_files(run_dir: Path, rank: int) -> tuple[Path, ...]:
    """Return the files of the events of a rank, in order: of an earlier version, and of this."""
    both = (run_dir / f"{_stem(rank)}.jsonl", events_path(run_dir, rank))
    return tuple(path for path in both if path.exists())


def _stem(rank: int) -> str:
    return "events" if rank == 0 else f"events.rank-{rank:04d}"


def step_mark(number: int, rank_waits_s: Sequence[float]) -> str:
    """Return what all ranks call a step that was taken once, and no other: ``12 5f0c...``.

    Starts of a run may take the same step again, and a rank that was killed early may not have
    written that it started, so the places of steps in files do not tell them apart. How long each
    rank has waited, which all ranks learn at the end of a step, is never the same twice.
    """
    return f"{number} {content_hash([number, *rank_waits_s])}"


class EventWriter:
    """Take the events of one rank; they are written by `end_step` and `flush`, once per step.

    A sampler leaves whole steps out. The last step that was left out stays in memory until the next
    step ends: `close` writes it, because the run may have failed.
    """

    def __init__(self, run_dir: Path, rank: int, sampler: StepSampler | None = None) -> None:
        """Open the file of `rank` to append to it, and write down the start."""
        self._rank, self._sampler = rank, sampler
        self._lines = JsonLines(events_path(run_dir, rank))
        self._pending: list[Event] = []
        self._left_out: list[Event] = []
        self._keeps, self._said = True, "" if sampler is None else sampler.says()
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.record(Event(kind=START, name=now, rank=rank))
        self.flush()

    def record(self, event: Event) -> None:
        """Take one event; cheap, because it happens within a step."""
        self._pending.append(event)

    def end_step(self, mark: str, step: int | None = None) -> None:
        """Write the events of a step, the last of which says that it ends here."""
        self.record(Event(kind=STEP, name=mark, rank=self._rank))
        if self._sampler is not None and step is not None:
            self._keeps = self._sampler.keeps(step)
            if self._said != (said := self._sampler.says()):
                self._said = said
                text = f"{said} from step {step} on"
                self._pending.insert(0, Event(kind=SAMPLED, name=text, rank=self._rank))
        self._left_out.clear()
        self.flush()

    def flush(self) -> None:
        """Write the events that were taken since the last time, or leave them out."""
        if self._keeps:
            self._write(self._pending)
        else:
            self._write(event for event in self._pending if event.kind in _OF_ALL_STEPS)
            self._left_out += (e for e in self._pending if e.kind not in _OF_ALL_STEPS)
        self._pending.clear()

    def close(self) -> None:
        """Write what is left, and the last step whatever the sampler says."""
        self._write([*self._left_out, *self._pending])
        self._left_out.clear()
        self._pending.clear()
        self._lines.close()

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            values = event.to_json()
            for key in ("start", "end", "waited_s"):
                values[key] = round(cast(float, values[key]), DECIMALS)
            self._lines.add(values)
        num_bytes = self._lines.flush()
        if self._sampler is not None:
            self._sampler.wrote(num_bytes)


def ranks_with_events(run_dir: Path) -> tuple[int, ...]:
    """Return the ranks that wrote events, in order; a file of another name is none of theirs."""
    named = (_OF_A_RANK.fullmatch(path.name) for path in run_dir.glob("events.rank-*.jsonl*"))
    ranks = {0, *(int(found[1]) for found in named if found is not None)}
    return tuple(rank for rank in sorted(ranks) if events_files(run_dir, rank))


@dataclass(slots=True, kw_only=True)
class StepSampler:
    """Selection of the steps that one rank writes."""

    budget_bytes: float
    """Most bytes of the files of this rank."""
    last_step: int
    """The last step of the run."""
    round_steps: int = 1
    """Steps of a round; a round is written whole or not at all."""
    periods: tuple[int, ...] = ()
    """Numbers of steps between checkpoints and between validations."""
    used_bytes: int = 0
    """Bytes of the files so far."""
    stride: int = 1
    """k: one of this number of rounds is written."""
    stride_of_periods: int = 1
    """The same for rounds in which the run saves or validates."""
    _first: int | None = None
    """First round of this start of the run."""
    _round: int | None = None
    """Round of the last call of `keeps`."""
    _keeps: bool = True
    """True if that round is written."""
    _sizes: list[int] = field(default_factory=list[int])
    """Bytes of each written round."""

    @classmethod
    def of_job(cls, job: Job, used_bytes: int) -> StepSampler:
        """Sampler of a rank of a job."""
        local = job.plan.mathematics.local_sgd
        every = (job.checkpoint.every, job.train.validate_every)
        return cls(
            budget_bytes=job.observe.events_budget_bytes / job.plan.mesh.world_size,
            last_step=job.train.steps,
            round_steps=local.every if local.active else 1,
            periods=tuple(period for period in every if period != "never"),
            used_bytes=used_bytes,
        )

    def keeps(self, step: int) -> bool:
        """True if the events of `step` are written; steps come in rising order."""
        number = (step - 1) // self.round_steps
        if number != self._round:
            self._round = number
            self._first = number if self._first is None else self._first
            if number >= self._warm_end:
                self._widen(number)
            self._keeps = self._keeps_round(number)
        return self._keeps

    def wrote(self, num_bytes: int) -> None:
        """Add bytes that were written of the current round."""
        self.used_bytes += num_bytes
        if self._sizes:
            self._sizes[-1] += num_bytes

    def says(self) -> str:
        """Sampled steps from now on, in words."""
        if self.stride == 1:
            return "every step"
        unit = "step" if self.round_steps == 1 else f"round of {self.round_steps} steps"
        return f"1 {unit} of {self.stride}"

    @property
    def _warm_end(self) -> int:
        """First round that may be left out."""
        return (self._first or 0) - (-WARM_UP // self.round_steps)

    @property
    def _last_round(self) -> int:
        return (self.last_step - 1) // self.round_steps

    def _keeps_round(self, number: int) -> bool:
        due = self._due(number)
        wanted = (
            number < self._warm_end
            or (number + 1) % self.stride == 0
            or (due is not None and due % self.stride_of_periods == 0)
        )
        # The last round is written in any case.
        room = self.used_bytes + 2 * self._mean() <= self.budget_bytes
        writes = number in (self._first, self._last_round) or (wanted and room)
        if writes:
            self._sizes.append(0)
        return writes

    def _due(self, number: int) -> int | None:
        """Number of times that the run saves or validates up to a round; None if not in this round.

        The longest period counts: its rounds are written the longest.
        """
        begin, end = number * self.round_steps, (number + 1) * self.round_steps
        due = [end // period for period in self.periods if end // period > begin // period]
        return min(due, default=None)

    def _mean(self) -> float:
        """Mean bytes of a written round."""
        sizes = [size for size in self._sizes if size]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def _widen(self, number: int) -> None:
        """Double the strides until the remaining rounds fit."""
        left = self._last_round - number + 1
        while self._mean() and self._projected(left) > self.budget_bytes:
            if self.stride <= left:
                self.stride *= 2
            elif self.stride_of_periods <= left:
                self.stride_of_periods *= 2
            else:
                return

    def _projected(self, left: int) -> float:
        """Bytes of the files at the end of the run."""
        steps = left * self.round_steps
        special = sum(steps / max(period, self.round_steps) for period in self.periods)
        rounds = min(left, left / self.stride + special / self.stride_of_periods) + 1
        return self.used_bytes + rounds * self._mean()
