# SPDX-License-Identifier: Apache-2.0
"""What became of a run, read from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.telemetry.bound import StepBound, read_bound
from echelon.telemetry.events import METRICS_FILE, ranks_with_events
from echelon.telemetry.json_lines import LogEntry, last_of_each_step, read_entries
from echelon.telemetry.recorded_steps import RecordedSteps
from echelon.telemetry.rounds import RoundSummary, summarize_rounds
from echelon.telemetry.run_directory import open_run
from echelon.telemetry.staleness import WorkerStaleness, staleness_of_run
from echelon.telemetry.trackers.progress import MirrorStatus, mirror_status
from echelon.training.checkpoint.folder import list_checkpoints


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
    """What else happened: workers or islands that were lost and came back."""
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
