"""`echelon observe`: what a run did; with --schedule, its pipeline as planned and as measured.

With --experts, which experts its tokens chose (`observe_experts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json
from echelon.cli.output import note, print_json, table

if TYPE_CHECKING:
    from echelon.observe.bubble import Bubble
    from echelon.observe.schedule_report import ScheduleReport
    from echelon.observe.summary import RunSummary
    from echelon.observe.timeline import Timeline

_NARROWEST = 60


def observe(
    run: Annotated[Path, Parameter(help="The folder of a run.")],
    /,
    *,
    schedule: Annotated[
        bool,
        Parameter(negative=(), show_default=False, help="Draw its pipeline, planned and measured."),
    ] = False,
    experts: Annotated[
        bool,
        Parameter(negative=(), show_default=False, help="Show the load of each expert, by layer."),
    ] = False,
    step: Annotated[
        int | None,
        Parameter(show_default=False, help="The step to show; the last one by default."),
    ] = None,
    svg: Annotated[
        Path | None,
        Parameter(show_default=False, help="Draw it into this file too, which must be new."),
    ] = None,
    json: Json = False,
) -> int:
    """Say what a run did; with --schedule, draw its pipeline and say why ranks were idle.

    With --experts, show how many tokens chose each expert in a step, and where they piled up.

    The timelines are also left in the run as Chrome traces: traces/planned.json.gz, and
    traces/measured.json.gz with the three steps up to the one that is drawn.
    """
    _require_fitting_flags(schedule, experts, step, svg)
    if experts:
        from echelon.cli.observe_experts import show_experts

        return show_experts(run, step, json)
    if not schedule:
        return _summary(run, json)
    from echelon.api.observing import observe_schedule

    report = observe_schedule(run, step=step, say=note)
    if svg is not None:
        from echelon.config.new_file import write_new
        from echelon.schedule.svg import panels_svg

        panels = [
            (f"{title}: {about}", timeline.events) for title, about, timeline, _ in _panels(report)
        ]
        write_new(svg, panels_svg(panels), key="--svg")
    if json:
        print_json("observe", report_json(report))
    else:
        width = max(_NARROWEST, min(160, get_terminal_size((100, 24)).columns))
        print(report_text(report, width=width), end="")
    return 0


def report_text(report: ScheduleReport, *, width: int = 100) -> str:
    """Return both timelines, one above the other, and the bubble of each by cause."""
    from echelon.schedule.draw import draw_timeline

    plan, pipe = report.plan, report.planned[0].pipe
    drawn = "" if len(report.planned) == 1 else f"; drawn: ranks {_list(pipe.ranks)}"
    lines = [
        f"{report.run.name}: {pipe.schedule.name} on {plan.mesh.pp} pipeline ranks, "
        f"{pipe.schedule.num_microbatches} microbatches{drawn}",
        "",
    ]
    for title, about, timeline, _ in _panels(report):
        lines += [f"{title}: {about}", draw_timeline(timeline.events, width)]
    for title, _, _, bubble in _panels(report):
        share = f"{100 * bubble.total_fraction:.1f} %"
        table_text = bubble_table(bubble, num_shown=len(pipe.ranks))
        lines += [f"bubble {title}: {share} of the time of all ranks", table_text, ""]
    lines += _closing(report)
    return "\n".join(lines) + "\n"


def bubble_table(bubble: Bubble, *, num_shown: int) -> str:
    """Return milliseconds by cause of the first ranks, and the share of each in all ranks' time."""
    from echelon.observe.bubble import Cause

    rows: list[tuple[str, ...]] = [
        (f"rank {rank.rank}", _ms(rank.busy_s), *(_ms(rank.idle_s[cause]) for cause in Cause))
        for rank in bubble.ranks[:num_shown]
    ]
    busy = bubble.busy_s / bubble.rank_s if bubble.rank_s else 0.0
    shares = (busy, *(bubble.fraction(cause) for cause in Cause))
    rows.append((f"all {len(bubble.ranks)}, %", *(f"{100 * share:.1f}" for share in shares)))
    return table(("ms", "busy", *(cause.value for cause in Cause)), rows)


def report_json(report: ScheduleReport) -> dict[str, object]:
    """Return the report as JSON: seconds, without the events, which are in the traces."""
    from echelon.observe.trace import MEASURED, PLANNED, trace_path

    return {
        "run": str(report.run),
        "schedule": report.planned[0].pipe.schedule.name,
        "step": report.step,
        "steps": sorted(report.measured),
        "measured_s": report.measured_s,
        "simulated_s": report.simulated_s,
        "ratio": report.ratio,
        "clock_uncertainty_s": report.clocks.uncertainty_s,
        "durations": asdict(report.durations),
        "planned": _bubble_json(report.planned_bubble),
        "measured": _bubble_json(report.measured_bubble),
        "traces": [str(trace_path(report.run, name)) for name in (PLANNED, MEASURED)],
    }


def _panels(report: ScheduleReport) -> Iterator[tuple[str, str, Timeline, Bubble]]:
    times = f"the medians of {_steps(report)}"
    yield "planned", f"simulated with {times}", report.planned[0], report.planned_bubble
    measured = report.measured[report.step][0]
    yield "measured", f"step {report.step}", measured, report.measured_bubble


def _closing(report: ScheduleReport) -> list[str]:
    shown, ranks = len(report.planned) * report.plan.mesh.pp, report.plan.mesh.world_size
    some = "" if shown == ranks else f"; {shown} of {ranks} ranks were looked at"
    return [
        f"step      {_ms(report.measured_s)} ms measured, {_ms(report.simulated_s)} ms simulated; "
        f"median of {_steps(report)} / simulated = {report.ratio:.3f}{some}",
        f"clocks    aligned by messages, to +- {1e3 * report.clocks.uncertainty_s:.2f} ms",
        f"traces    {report.run / 'traces'}: open them at ui.perfetto.dev",
    ]


def _steps(report: ScheduleReport) -> str:
    numbers = sorted(report.measured)
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {_list(numbers)}"


def _bubble_json(bubble: Bubble) -> dict[str, object]:
    from echelon.observe.bubble import Cause

    return {
        "bubble": bubble.total_fraction,
        "by_cause": {cause.value: bubble.fraction(cause) for cause in Cause},
        "ranks": [
            {
                "rank": rank.rank,
                "busy_s": rank.busy_s,
                "idle_s": {cause.value: rank.idle_s[cause] for cause in Cause},
            }
            for rank in bubble.ranks
        ],
    }


def _require_fitting_flags(
    schedule: bool, experts: bool, step: int | None, svg: Path | None
) -> None:
    from echelon.core.errors import ConfigError
    from echelon.core.rulebook.command_line import BAD_ARGUMENT

    problems: list[tuple[str, tuple[str, ...]]] = []
    if schedule and experts:
        message = "--schedule and --experts are two questions"
        problems.append((message, ("--schedule", "--experts")))
    if step is not None and not (schedule or experts):
        message = "--step says which step to show of what --schedule or --experts asks for"
        problems.append((message, ("--schedule --step", "--experts --step")))
    if svg is not None and not schedule:
        problems.append(("--svg draws the schedule, without --schedule", ("--schedule --svg",)))
    if problems:
        raise ConfigError(
            [
                BAD_ARGUMENT.problem(message, set_by="the command line", works=works)
                for message, works in problems
            ]
        )


def _summary(run: Path, json: bool) -> int:
    from echelon.observe.summary import summarize_run

    summary = summarize_run(run)
    if json:
        print_json("observe", asdict(summary))
    else:
        print(summary_text(summary), end="")
    return 0


def summary_text(summary: RunSummary) -> str:
    """Return what became of a run, one fact to a line."""
    from echelon.core.units import binary_bytes, short_count

    facts = [
        ("run", f"{summary.name}, plan {summary.plan_hash}"),
        ("steps", f"{summary.steps} of {summary.total_steps}"),
    ]
    if summary.starts > 1:
        facts.append(("started", f"{summary.starts} times"))
    if summary.first_loss is not None and summary.last_loss is not None:
        facts.append(("loss", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}"))
    if summary.first_validation is not None and summary.last_validation is not None:
        facts.append(
            ("validation", f"{summary.first_validation:.4f} -> {summary.last_validation:.4f}")
        )
    if summary.first_imbalance is not None and summary.last_imbalance is not None:
        dropped = 100 * (summary.dropped_share or 0.0)
        facts.append(
            (
                "experts",
                f"imbalance {summary.first_imbalance:.2f}x -> {summary.last_imbalance:.2f}x "
                f"(worst layer), {dropped:.1f} % dropped",
            )
        )
    if summary.step_s is not None and summary.tokens_per_s is not None:
        rate = short_count(summary.tokens_per_s)
        facts.append(("step", f"{_ms(summary.step_s)} ms, {rate} tokens/s (medians)"))
    if summary.peak_bytes is not None:
        facts.append(("memory", f"{binary_bytes(summary.peak_bytes)} at most on a rank"))
    if summary.checkpoints:
        facts.append(("checkpoints", _list(summary.checkpoints)))
    return "".join(f"{name:<12}{text}\n" for name, text in facts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _list(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
