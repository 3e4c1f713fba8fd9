# SPDX-License-Identifier: Apache-2.0
"""The observer of one rank: training calls it, and it writes files and prints lines.

Every rank writes its events and, when it ends, how much memory it came to use (a line of
logs/rank-0000.jsonl); rank 0 also writes metrics.jsonl and prints the step line, or the first
island that is there. Of experts, one rank of each pipeline stage writes the loads of its layers
(routing.jsonl).
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import closing
from pathlib import Path

from echelon.config.job import Job
from echelon.core.event import EventSink, NoEvents
from echelon.core.plan import Plan
from echelon.cost.seconds.kernels import model_flops_per_token
from echelon.layout.islands import islands_of
from echelon.telemetry.console import (
    Console,
    MemoryReading,
    StepLine,
    Throughput,
    TimeRemaining,
    device_memory,
    process_memory,
)
from echelon.telemetry.events import (
    METRICS_FILE,
    START,
    STEP,
    EventWriter,
    StepSampler,
    events_files,
    step_mark,
)
from echelon.telemetry.json_lines import JsonLines, read_entries
from echelon.telemetry.routing import load_entries, routing_entry, routing_path
from echelon.training.observer import RunObserver, StepFacts

_TOLD = (
    *("step", "mark", "loss", "grad_norm", "learning_rate", "tokens", "step_s"),
    *("rank_waits_s", "rank_used_bytes", "peak_bytes", "loss_scale", "skipped"),
)
"""What metrics.jsonl says of a step, in this order."""


def observe_rank(job: Job, run_dir: Path, rank: int) -> RunObserver:
    """Return the observer of `rank`: what training is given by name."""
    if rank not in telling_ranks(job.plan):
        return RankObserver(job, run_dir, rank)
    if job.plan.mathematics.local_sgd.is_elastic:
        return IslandObserver(job, run_dir, rank)
    return ChiefObserver(job, run_dir, rank)


def telling_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the rank that tells of a run: the first that it never goes on without.

    Of islands that may be lost those of which one does at a time.
    """
    if plan.mathematics.local_sgd.is_elastic:
        return tuple(island.first_rank for island in islands_of(plan))
    return (0,)


class RankObserver:
    """Write the events of one rank, and how much memory it came to use."""

    def __init__(self, job: Job, run_dir: Path, rank: int) -> None:
        """Open the files of `rank` in the run directory."""
        self.job, self.run_dir, self.rank = job, run_dir, rank
        self._events: EventWriter | None = None
        if job.observe.events:
            used = sum(path.stat().st_size for path in events_files(run_dir, rank))
            self._events = EventWriter(run_dir, rank, StepSampler.of_job(job, used))
        self._routing: JsonLines | None = None
        self._first: int | None = None
        self._closed = False

    @property
    def sink(self) -> EventSink:
        """Return where the events of this rank go."""
        return NoEvents() if self._events is None else self._events

    def used_bytes(self) -> int:
        """Return the memory that this rank uses now."""
        return self.memory().used_bytes

    def stepped(self, facts: StepFacts) -> None:
        """Write the events of a step, and where a line is due, the loads of its experts."""
        if self._events is not None:
            self._events.end_step(step_mark(facts.step, facts.rank_waits_s), facts.step)
        self._first = self._first or facts.step
        due = facts.step % self.job.observe.log_every == 0
        if facts.loads and (due or facts.step in (self._first, self.job.train.steps)):
            # A rank that has no loads to tell writes no file.
            self._routing = self._routing or JsonLines(routing_path(self.run_dir, self.rank))
            for entry in load_entries(facts.step, facts.loads):
                self._routing.add(entry)
            self._routing.flush()

    def validated(self, step: int, loss: float) -> None:
        """Write the events of a validation."""
        if self._events is not None:
            self._events.flush()

    def saved(self, step: int, path: Path) -> None:
        """Learn that a checkpoint was committed: the chief writes it down."""

    def noted(self, step: int, text: str) -> None:
        """Learn what else happened: the chief writes it down."""

    def speaks(self, now: bool) -> None:
        """Learn whether this rank tells of the run: where none may be lost the chief does."""

    def close(self) -> None:
        """Write what is left, and the peak memory of this rank."""
        if self._closed:
            return
        self._closed = True
        if self._events is not None:
            self._events.close()
        if self._routing is not None:
            self._routing.close()
        with closing(JsonLines(self.run_dir / "logs" / f"rank-{self.rank:04d}.jsonl")) as lines:
            memory = self.memory()
            lines.add({"rank": self.rank, "time": time.time(), "peak_bytes": memory.peak_bytes})

    def memory(self) -> MemoryReading:
        """Return the memory of the device that this rank drives, or of its process on a CPU."""
        return device_memory() if self.job.plan.cluster.backend == "nccl" else process_memory()


class ChiefObserver(RankObserver):
    """Write metrics.jsonl and print the step line as well: what one rank of a run does."""

    def __init__(self, job: Job, run_dir: Path, rank: int = 0) -> None:
        """Open the files of `rank`, and note the start."""
        super().__init__(job, run_dir, rank)
        self._throughput, self._left = Throughput(), TimeRemaining(job.train.steps)
        self._flops_per_s = peak_flops(job.plan)
        self._open()

    def _open(self) -> None:
        """Begin to tell of a run from its start."""
        self._go_on()
        self._write(START, plan_hash=self.job.plan.content_hash(), steps=self.job.train.steps)

    def _go_on(self) -> None:
        job = self.job
        self._console = Console(log_every=job.observe.log_every, total_steps=job.train.steps)
        self._metrics = JsonLines(self.run_dir / METRICS_FILE)

    def stepped(self, facts: StepFacts) -> None:
        """Write and print one step."""
        super().stepped(facts)
        self._throughput.add(facts.tokens, facts.step_s)
        self._left.step(facts.step)
        self._tell(facts)

    def _tell(self, facts: StepFacts) -> None:
        memory = self.memory()
        beside = {
            "mark": step_mark(facts.step, facts.rank_waits_s),
            "peak_bytes": memory.peak_bytes,
        }
        told = {key: beside[key] if key in beside else getattr(facts, key) for key in _TOLD}
        met = {"islands": list(facts.islands)} if facts.islands else {}
        self._write(STEP, **told, **met, **routing_entry(facts.routing))
        self._console.step(
            StepLine(
                facts=facts,
                plan=self.job.plan,
                total_steps=self.job.train.steps,
                tokens_per_s=self._throughput.tokens_per_s,
                memory_bytes=memory.total_bytes,
                seconds_left=self._left.seconds(facts.step_s),
                mfu=self._utilization(),
            )
        )

    def validated(self, step: int, loss: float) -> None:
        """Write and print a validation loss."""
        super().validated(step, loss)
        self._write("validation", step=step, loss=loss)
        self._console.noted(step, f"validation loss {loss:.4f}")

    def saved(self, step: int, path: Path) -> None:
        """Write and print that a checkpoint was committed."""
        self._write("checkpoint", step=step, path=str(path))
        self._console.noted(step, f"saved {path}")

    def noted(self, step: int, text: str) -> None:
        """Write and print what else happened."""
        self._write("note", step=step, text=text)
        self._console.noted(step, text)

    def close(self) -> None:
        """Write what is left, and take the progress bar away."""
        self._console.close()
        self._metrics.close()
        super().close()

    def _utilization(self) -> float | None:
        """Return the model FLOPs per second over the peak of all devices, where that is known."""
        if self._flops_per_s is None or self._throughput.step_s <= 0:
            return None
        mathematics = self.job.plan.mathematics
        per_token = model_flops_per_token(mathematics.model, mathematics.sequence_length)
        # Every position is computed, whether or not its loss is counted.
        done = per_token * self.job.plan.tokens_per_step / self._throughput.step_s
        return done / self._flops_per_s

    def _write(self, kind: str, **entry: object) -> None:
        self._metrics.add({"kind": kind, "time": time.time(), **entry})
        self._metrics.flush()


class IslandObserver(ChiefObserver):
    """Tell of a run while its island is the first of those that are there.

    Another island may be lost before it has written all lines of a round, or of the meeting before:
    so these are kept, and whoever takes over writes those that are not in the file.
    """

    def __init__(self, job: Job, run_dir: Path, rank: int) -> None:
        """Open what is of `rank` alone."""
        self._speaks: bool | None = None
        self._kept: deque[StepFacts] = deque()
        self._met = self._met_before = 0
        super().__init__(job, run_dir, rank)

    def _open(self) -> None:
        """Wait until it is known who tells."""

    def speaks(self, now: bool) -> None:
        """Begin to tell, or leave it to another; who does so at first notes the start."""
        if now and self._speaks is None:
            super()._open()
        elif now and not self._speaks:
            self._take_over()
        elif not now and self._speaks:
            self._console.close()
            self._metrics.close()
        self._speaks = now

    def saved(self, step: int, path: Path) -> None:
        """Write and print that a checkpoint was committed, where this rank tells."""
        if self._speaks:
            super().saved(step, path)

    def noted(self, step: int, text: str) -> None:
        """Write and print what else happened, where this rank tells."""
        if self._speaks:
            super().noted(step, text)

    def close(self) -> None:
        """Write what is left."""
        if self._speaks:
            super().close()
        else:
            RankObserver.close(self)

    def _tell(self, facts: StepFacts) -> None:
        if self._speaks:
            super()._tell(facts)
        self._kept.append(facts)
        if facts.islands:
            self._met_before, self._met = self._met, facts.step
        while self._kept[0].step <= self._met_before:
            self._kept.popleft()

    def _take_over(self) -> None:
        """Go on with the lines of another, who may be lost."""
        self._go_on()
        entries = read_entries(self.run_dir / METRICS_FILE)
        steps = [one.whole("step") for one in entries if one.text("kind") == STEP]
        for facts in self._kept:
            if not steps or facts.step > steps[-1]:
                super()._tell(facts)


def peak_flops(plan: Plan) -> float | None:
    """Return the peak FLOP/s of all devices of a plan, or None where it is not known."""
    each = plan.cluster.device.flops(plan.mathematics.precision.parameters)
    return None if each is None else each * plan.mesh.world_size
