# SPDX-License-Identifier: Apache-2.0
"""What became of a run, read from its folder alone.

What islands of local SGD sent each other is read from the events of its first rank. Where islands
may be lost, each step is read from the first rank of the island that told of it, and the formulas
are those of the islands that met; sums that did not count are sent beside these.

How stale the gradients of each worker were is in the events of asynchronous servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from echelon.core.axis import Axis
from echelon.core.choices.updates import AppliedGradient
from echelon.core.event import APPLY
from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.plan import Plan
from echelon.cost.bytes.local_sgd import mean_outer_bytes, outer_bytes, rejoin_bytes
from echelon.layout.islands import islands_of
from echelon.telemetry.bound import StepBound, read_bound
from echelon.telemetry.events import METRICS_FILE, STEP, events_files, ranks_with_events
from echelon.telemetry.json_lines import LogEntry, last_of_each_step, read_entries
from echelon.telemetry.recorded_steps import RecordedSteps
from echelon.telemetry.run_directory import open_run
from echelon.telemetry.trackers.progress import MirrorStatus, mirror_status
from echelon.training.checkpoint.folder import list_checkpoints

OUTER = "outer "
"""How names of events begin that are of meetings."""
REJOIN = "rejoin."
"""The same of what an island is given that comes back."""
ROUND = "round"
"""The name of the last event of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Say what a run did.

    Steps that a resumed run took again count once; None: there is none yet.
    """

    name: str
    """The name of the run."""
    plan_hash: str
    """Hash of the content of its plan."""
    starts: int
    """Times that it was started."""
    steps: int
    """The last step that was done."""
    total_steps: int
    """The steps that it is to do."""
    tokens: int
    """Counted tokens of all steps."""
    first_loss: float | None
    """Loss of the first step."""
    last_loss: float | None
    """Loss of the last step."""
    first_validation: float | None
    """The first validation loss."""
    last_validation: float | None
    """The last validation loss."""
    best_validation: float | None
    """The least validation loss."""
    num_validations: int
    """How often the model was validated."""
    step_s: float | None
    """Seconds of a step, the median."""
    tokens_per_s: float | None
    """Tokens per second, the median over steps."""
    peak_bytes: int | None
    """The most bytes that any rank used (rank 0 alone while the run goes on)."""
    checkpoints: tuple[int, ...]
    """Steps of its checkpoints."""
    first_imbalance: float | None = None
    """Tokens of the busiest expert over the mean, of the worst layer, in the first step."""
    last_imbalance: float | None = None
    """The same in the last step."""
    dropped_share: float | None = None
    """Share of all assignments of the run for which there was no room."""
    bound: StepBound | None = None
    """What binds its steps, by the events that its ranks recorded."""
    staleness: tuple[WorkerStaleness, ...] = ()
    """How stale the gradients of each worker of asynchronous servers were."""
    rounds: RoundSummary | None = None
    """How the islands of local SGD met, where there are some."""
    recorded: str = ""
    """Steps that have events, if the run left some out; else empty."""
    notes: tuple[str, ...] = ()
    """What else happened: islands that were lost and came back."""
    mirrors: tuple[MirrorStatus, ...] = ()
    """How its mirrors in trackers stand, those that were begun."""

    def _repr_html_(self) -> str | None:
        """Return the summary, as a notebook shows it: its numbers."""
        return NOTEBOOK_VIEWS.html("summary", self)


def step_losses(run_dir: Path) -> tuple[float, ...]:
    """Return the loss of each step of the run in `run_dir`, in their order."""
    entries = read_entries(run_dir / METRICS_FILE)
    steps = last_of_each_step(one for one in entries if one.text("kind") == "step")
    return tuple(_numbers(steps, "loss"))


def summarize_run(run_dir: Path) -> RunSummary:
    """Return the summary of the run in `run_dir`; ConfigError where it is not a run."""
    run = open_run(run_dir)
    plan = run.plan()
    by_kind: dict[str, list[LogEntry]] = {}
    for entry in read_entries(run_dir / METRICS_FILE):
        by_kind.setdefault(entry.text("kind"), []).append(entry)
    steps = last_of_each_step(by_kind.get("step", []))
    validations = _numbers(last_of_each_step(by_kind.get("validation", [])), "loss")
    starts = by_kind.get("start", [])
    seconds = _numbers(steps, "step_s")
    losses = _numbers(steps, "loss")
    routed = [step for step in steps if "imbalance" in step.values]
    imbalances = _numbers(routed, "imbalance")
    return RunSummary(
        name=run.name,
        plan_hash=plan.content_hash(),
        starts=len(starts),
        steps=steps[-1].whole("step") if steps else 0,
        total_steps=starts[-1].whole("steps") if starts else plan.mathematics.optimizer.total_steps,
        tokens=sum(step.whole("tokens") for step in steps),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        first_validation=validations[0] if validations else None,
        last_validation=validations[-1] if validations else None,
        best_validation=min(validations, default=None),
        num_validations=len(validations),
        step_s=median(seconds) if seconds else None,
        tokens_per_s=_rate(steps),
        peak_bytes=_peak(run.logs, steps),
        checkpoints=tuple(checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)),
        first_imbalance=imbalances[0] if imbalances else None,
        last_imbalance=imbalances[-1] if imbalances else None,
        dropped_share=_dropped(routed),
        bound=read_bound(run_dir, plan),
        staleness=staleness_of_run(run_dir, plan),
        rounds=summarize_rounds(run_dir, plan),
        recorded=_recorded(run_dir),
        notes=tuple(entry.text("text") for entry in by_kind.get("note", [])),
        mirrors=mirror_status(run_dir),
    )


def _recorded(run_dir: Path) -> str:
    """Steps with events of the first rank; empty if it wrote all steps, or none."""
    steps = RecordedSteps(run_dir, ranks_with_events(run_dir)[:1])
    return steps.says() if 0 < len(steps.numbers) < len(steps.taken) else ""


def _numbers(entries: Sequence[LogEntry], key: str) -> list[float]:
    return [number for entry in entries if (number := entry.number(key)) is not None]


def _dropped(steps: Sequence[LogEntry]) -> float | None:
    assignments = sum(step.whole("assignments") for step in steps)
    return sum(step.whole("dropped") for step in steps) / assignments if assignments else None


def _rate(steps: Sequence[LogEntry]) -> float | None:
    timed = [(step.whole("tokens"), step.number("step_s")) for step in steps]
    rates = [tokens / seconds for tokens, seconds in timed if seconds]
    return median(rates) if rates else None


def _peak(logs: Path, steps: Sequence[LogEntry]) -> int | None:
    ends = [entry for path in sorted(logs.glob("rank-*.jsonl")) for entry in read_entries(path)]
    return max((entry.whole("peak_bytes") for entry in (*ends, *steps)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """Say how islands met; bytes are those that rank 0 sent over `dp_replicate`."""

    every: int
    """Steps of a round."""
    rounds: int
    """Rounds that are over."""
    steps: int
    """Steps of which there are events."""
    sent_bytes: int
    """Bytes sent in all of these."""
    planned_bytes: float
    """Bytes of a mean step, by the formulas."""
    islands: int = 0
    """Islands of a run that loses none."""
    short_rounds: int = 0
    """Rounds at whose end fewer met, where some may be lost."""
    fewest: int = 0
    """The fewest islands that met."""

    @property
    def mean_bytes(self) -> float:
        """Return the bytes of a mean step."""
        return self.sent_bytes / max(1, self.steps)


def summarize_rounds(run_dir: Path, plan: Plan) -> RoundSummary | None:
    """Return how the islands of a run met; None where there are none, or no events."""
    local = plan.mathematics.local_sgd
    if local.is_elastic:
        return _rounds_that_count(run_dir, plan)
    if not local.active or not events_files(run_dir, 0):
        return None
    recorded = RecordedSteps(run_dir, [0])
    sent = 0
    for number in recorded.numbers:
        for event in recorded.read(number).events[0]:
            if event.axis == Axis.DP_REPLICATE and event.name.startswith((OUTER, ROUND)):
                sent += event.bytes
    terms = mean_outer_bytes(plan, 0)
    return RoundSummary(
        every=local.every,
        rounds=sum(step.number % local.every == 0 for step in recorded.taken),
        steps=len(recorded.numbers),
        sent_bytes=sent,
        planned_bytes=sum(term.count * term.each / term.every for term in terms),
    )


def _rounds_that_count(run_dir: Path, plan: Plan) -> RoundSummary | None:
    """Return the same of islands that may be lost; None where nobody has told who met."""
    local, ranks = plan.mathematics.local_sgd, [one.first_rank for one in islands_of(plan)]
    entries = [e for e in read_entries(run_dir / METRICS_FILE) if e.text("kind") == STEP]
    taken = last_of_each_step(entries)
    met = {e.whole("step"): e.whole_numbers("islands") for e in taken if "islands" in e.values}
    ends = [len(islands) for step, islands in met.items() if step % local.every == 0]
    sent: dict[int, int] = {}
    planned = 0.0
    for rank in (rank for rank in ranks if events_files(run_dir, rank)):
        recorded = RecordedSteps(run_dir, [rank])
        for number in (one for one in recorded.numbers if one not in sent):
            events = recorded.read(number).events[rank]
            sent[number] = sum(one.bytes for one in events if one.name.startswith((OUTER, REJOIN)))
            gifts = [one.name for one in events if one.name.startswith(REJOIN)]
            planned += len(gifts) // max(1, len(set(gifts))) * rejoin_bytes(plan, rank)
            if number in met:
                terms = outer_bytes(plan, rank, number - 1, present=len(met[number]))
                planned += sum(term.bytes for term in terms)
    if not sent:
        return None
    return RoundSummary(
        every=local.every,
        rounds=len(ends),
        steps=len(sent),
        sent_bytes=sum(sent.values()),
        planned_bytes=planned / len(sent),
        islands=local.islands,
        short_rounds=sum(count < local.islands for count in ends),
        fewest=min(ends, default=local.islands),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStaleness:
    """Say how many gradients of a worker were how stale, on all servers together."""

    worker: int
    """The worker."""
    histogram: Mapping[int, int]
    """Staleness -> gradients that had it."""

    @property
    def num_applied(self) -> int:
        """Return how many were applied."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float:
        """Return the mean staleness."""
        total = sum(staleness * count for staleness, count in self.histogram.items())
        return total / max(1, self.num_applied)


def staleness_of_run(run_dir: Path, plan: Plan) -> tuple[WorkerStaleness, ...]:
    """Return the staleness of each worker; nothing where no server applies gradients one by one.

    A step that a resumed run took again counts as it was taken last.
    """
    updates = plan.mathematics.updates
    if not updates.is_asynchronous:
        return ()
    found: dict[tuple[int, int, int], int] = {}
    for rank in plan.mesh.server_ranks:
        entries = chain.from_iterable(map(read_entries, events_files(run_dir, rank)))
        for entry in entries:
            if entry.text("kind") != APPLY:
                continue
            one = AppliedGradient.from_event(entry.text("name"))
            if one is not None:
                found[rank, one.worker, one.step] = one.staleness
    by_worker = {worker: Counter[int]() for worker in range(plan.mesh.num_workers)}
    for (_, worker, _), staleness in found.items():
        by_worker[worker][staleness] += 1
    return tuple(
        WorkerStaleness(worker=worker, histogram=dict(sorted(histogram.items())))
        for worker, histogram in by_worker.items()
    )
