# SPDX-License-Identifier: Apache-2.0
"""The schedule of a run as it was planned and as it ran, from its folder alone.

The planned side is the plan's schedule in the simulator. Before the run it is timed by the times
that the plan was made from, measured ones or those of `cost/seconds/`; afterwards by
the run's own actions, the median of each kind on each stage, so that planned and measured differ
by what the schedule, and not the arithmetic, makes of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.run import RUN_IS_PIPELINED, STEP_RECORDED
from echelon.cost.seconds.unit_times import UnitTimes, stage_durations
from echelon.schedule.simulate import Durations
from echelon.telemetry.bubble import Bubble, bubble_from_timelines
from echelon.telemetry.events import ranks_with_events
from echelon.telemetry.recorded_steps import RecordedStep, RecordedSteps, no_events, step_ranges
from echelon.telemetry.run_directory import open_run
from echelon.telemetry.timeline import (
    MEASURED,
    PLANNED,
    ClockOffsets,
    RunPipeline,
    Timeline,
    chrome_trace,
    clock_offsets_from_steps,
    is_whole,
    measured_durations,
    measured_timelines,
    pipelines_from_plan,
    planned_timelines,
    trace_path,
    write_trace,
)

STEPS_SHOWN = 3
"""Steps that a measured trace holds and that action times are taken from: the last ones."""

_LOOKED_BACK = 8
"""Steps that are looked at for the last whole one, and that clocks are aligned by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineReport:
    """Hold the planned and the measured timelines of a run's pipelines.

    `measured` has the steps up to `step`, three at most, all of one start of the run; `planned` is
    one step, fed with their `durations`. Each has the timelines of the same pipelines. `newest` is
    the last step that the run took, whether or not its events are there.
    """

    run: Path
    plan: Plan
    step: int
    newest: int
    clocks: ClockOffsets
    durations: Durations
    planned: tuple[Timeline, ...]
    measured: Mapping[int, tuple[Timeline, ...]]

    @property
    def planned_bubble(self) -> Bubble:
        """Return the bubble of the simulated step."""
        return bubble_from_timelines(self.planned)

    @property
    def measured_bubble(self) -> Bubble:
        """Return the bubble of the step that is shown."""
        return bubble_from_timelines(self.measured[self.step])

    @property
    def simulated_s(self) -> float:
        """Return the seconds of the simulated step, first to last action."""
        return self.planned[0].span_s

    @property
    def measured_s(self) -> float:
        """Return the seconds of the step that is shown, of its slowest pipeline."""
        return _span(self.measured[self.step])

    @property
    def ratio(self) -> float:
        """Return measured over simulated: the median of the steps that the times come from."""
        spans = [_span(timelines) for timelines in self.measured.values()]
        return median(spans) / self.simulated_s if self.simulated_s else 0.0


def read_schedule_report(run_dir: Path, *, step: int | None = None) -> TimelineReport:
    """Return the report of a step of a run, the last one unless `step` says which.

    ConfigError where `run_dir` is no run, or the events of that step are not there.
    """
    plan = open_run(run_dir).plan()
    pipes = pipelines_from_plan(plan)
    steps, newest = read_last_steps(run_dir, plan, pipes, step)
    clocks = clock_offsets_from_steps(pipes, steps)
    last = steps[-STEPS_SHOWN:]
    measured = {one.number: measured_timelines(pipes, one, clocks) for one in last}
    durations = measured_durations([line for lines in measured.values() for line in lines])
    return TimelineReport(
        run=run_dir,
        plan=plan,
        step=steps[-1].number,
        newest=newest,
        clocks=clocks,
        durations=durations,
        planned=planned_timelines(pipes, durations),
        measured=measured,
    )


def require_pipeline(plan: Plan, run_dir: Path) -> None:
    """Raise ConfigError where a run has no pipeline to draw."""
    if plan.mesh.pp == 1:
        ranks = plan.mesh.world_size
        raise ConfigError(
            RUN_IS_PIPELINED.problem(
                f"{run_dir} ran with pp = 1 on {ranks} {'rank' if ranks == 1 else 'ranks'}: "
                "there is no pipeline to draw",
                key="mesh.pp",
                suggestions=["a run with mesh.pp=2 or more"],
            )
        )


def write_planned_trace(run_dir: Path, plan: Plan, times: UnitTimes) -> None:
    """Write the planned trace of a run that has not run yet, timed by what it was planned with."""
    planned = planned_timelines(pipelines_from_plan(plan), stage_durations(plan, times))
    durations = f"{times.source}: {times.where or 'cost/seconds/'}"
    _write(run_dir, PLANNED, plan, {1: planned}, durations=durations)


def write_traces(report: TimelineReport) -> tuple[Path, Path]:
    """Write both traces of a run that has run, the planned one timed by its own actions."""
    run_dir, plan = report.run, report.plan
    steps = ", ".join(str(number) for number in sorted(report.measured))
    durations = f"measured: medians of steps {steps}"
    planned = _write(run_dir, PLANNED, plan, {1: report.planned}, durations=durations)
    known = {"steps": steps, "clock_uncertainty_s": report.clocks.uncertainty_s}
    return planned, _write(run_dir, MEASURED, plan, report.measured, **known)


def _write(
    run_dir: Path, name: str, plan: Plan, lines: Mapping[int, Sequence[Timeline]], **told: object
) -> Path:
    path, pipelines = trace_path(run_dir, name), next(iter(lines.values()))
    ranks = sum(len(line.pipeline.ranks) for line in pipelines)
    about = {
        "plan": plan.name,
        "plan_hash": plan.content_hash(),
        "schedule": plan.layout.pipeline.schedule,
        "ranks": f"{ranks} of {plan.mesh.world_size}",
        **told,
    }
    write_trace(path, chrome_trace(lines, plan.mesh, about=about))
    return path


def _span(timelines: Sequence[Timeline]) -> float:
    return max(timeline.span_s for timeline in timelines)


def read_last_steps(
    run_dir: Path, plan: Plan, pipes: Sequence[RunPipeline], wanted: int | None = None
) -> tuple[list[RecordedStep], int]:
    """Return the step that is wanted, last, those that are read with it, and the newest taken.

    ConfigError where events of these pipelines, or of that step, are not there.
    """
    ranks = [rank for pipe in pipes for rank in pipe.ranks]
    _require_events(run_dir, plan, ranks)
    recorded = RecordedSteps(run_dir, ranks)
    if recorded.taken and all(step.mark is None for step in recorded.taken):
        raise _not_recorded(
            f"the steps of {run_dir} were recorded by an earlier version of Echelon, which did not "
            "mark them: after a kill it is not known which events are whose",
            (),
        )
    if wanted is not None and wanted not in recorded.numbers:
        raise _not_recorded(
            f"step {wanted} of {run_dir} was not recorded", recorded.numbers, near=wanted
        )
    upto = [number for number in recorded.numbers if wanted is None or number <= wanted]
    found: list[RecordedStep] = []
    read = map(recorded.read, upto[-1 : -1 - _LOOKED_BACK : -1])
    for step in (step for step in read if all(is_whole(pipe, step) for pipe in pipes)):
        if not found and wanted is not None and step.number != wanted:
            raise _not_recorded(
                f"step {wanted} of {run_dir} does not have the actions of its plan's schedule",
                [step.number],
            )
        if found and step.start != found[0].start:
            break
        found.append(step)
    if not found:
        raise _not_recorded(f"no whole step of {run_dir} was recorded", ())
    newest = recorded.taken[-1]
    if wanted is None and found[0].start != newest.start:
        raise _not_recorded(
            f"step {newest.number} of {run_dir}, its newest, was not recorded, nor was any other "
            "since the run was last started",
            [number for number in recorded.numbers if number <= found[0].number],
        )
    return found[::-1], newest.number


def _require_events(run_dir: Path, plan: Plan, ranks: Sequence[int]) -> None:
    there = ranks_with_events(run_dir)
    if missing := [rank for rank in ranks if rank not in there]:
        named = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if missing[8:] else "")
        what = f"no events of ranks {named}" if there else "no events at all"
        raise no_events(run_dir, f"{what}; its plan has {plan.mesh.world_size} ranks")


def _not_recorded(message: str, numbers: Sequence[int], near: int | None = None) -> ConfigError:
    """Return the error of a step without events; it suggests those `near` it, or the last."""
    nearest = numbers if near is None else sorted(numbers, key=lambda n: (-abs(n - near), n))
    suggestions = sorted(nearest[-3:])
    there = f"it has {step_ranges(numbers)}" if numbers else "it has none"
    return ConfigError(
        STEP_RECORDED.problem(f"{message}; {there}", key="--step", suggestions=suggestions)
    )
