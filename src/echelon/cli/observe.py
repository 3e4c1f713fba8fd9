# SPDX-License-Identifier: Apache-2.0
"""`echelon observe`: a run and its pipeline; its experts, its progress, its copy in a tracker."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from time import sleep
from typing import Annotated, TextIO

from cyclopts import Parameter

from echelon.api.observing import mirror_run, observe_experts, observe_schedule
from echelon.api.observing import observe as observe_run
from echelon.cli.flags import (
    DRAWING,
    OUT,
    REPORT,
    Json,
    Names,
    WrittenFiles,
    argument_problem,
    bad_argument,
)
from echelon.cli.output import WIDEST, note, page_columns, print_result
from echelon.config.files.new_file import write_new
from echelon.core.choices.trackers import TRACKERS
from echelon.core.errors import ConfigError, Problem
from echelon.core.rules import did_you_mean
from echelon.core.units import binary_bytes
from echelon.page.documents.run import listed, milliseconds, run_facts, run_page, steps_text
from echelon.planner.view.text_layout import fit_page, table
from echelon.schedule.draw import draw_timeline, panels_svg
from echelon.telemetry.bubble import Bubble, IdleCause
from echelon.telemetry.live import ASCII, UNICODE, RunFollower
from echelon.telemetry.routing import ExpertHotspots, RecordedLoad
from echelon.telemetry.schedule_report import TimelineReport
from echelon.telemetry.summary import RunSummary
from echelon.telemetry.timeline import MEASURED, PLANNED, Timeline, trace_path

_PIPED = 100  # columns of a drawing that no terminal shows

_SHOWN = 16
"""Experts that have a column each; of more, those with most and fewest tokens are named."""
_LOAD_FACTS = ("layer", "counts", "imbalance", "busiest", "dropped", "aux_loss", "z_loss")
LOOK_S = 1.0  # s between two looks


def observe(
    run: Annotated[Path, Parameter(help="The folder of a run.")],
    /,
    *,
    schedule: Annotated[
        bool, Parameter(show_default=False, help="Draw its pipeline, planned and measured.")
    ] = False,
    experts: Annotated[
        bool, Parameter(show_default=False, help="Show the load of each expert, by layer.")
    ] = False,
    step: Annotated[
        int | None, Parameter(help="The step to show; the last one by default.")
    ] = None,
    out: Annotated[
        Names,
        Parameter(
            show_default=False,
            help="What to write, by its ending: a page that opens anywhere as FILE.html, its "
            "figures as FOLDER/, NAME.svg or NAME.png; with --schedule the drawing as FILE.svg; "
            "repeat for more.",
        ),
    ] = (),
    serve: Annotated[
        bool, Parameter(negative="", help="Serve that page to this machine, and follow the run.")
    ] = False,
    follow: Annotated[
        bool, Parameter(negative="", help="Follow the run in this terminal, until it ends.")
    ] = False,
    mirror: Annotated[
        str | None, Parameter(help="Mirror it in tensorboard, wandb, mlflow or trackio.")
    ] = None,
    json: Json = False,
) -> int:
    """Say what a run did; with --schedule, draw its pipeline and say why ranks were idle.

    With --experts, show how many tokens chose each expert in a step, and where they piled up.

    The timelines are also left in the run as Chrome traces: traces/planned.json.gz, and
    traces/measured.json.gz with the three steps up to the one that is drawn.
    """
    _require_fitting_flags(schedule, experts, step)
    for flag, name, others in (
        (serve, "--serve is a page of everything", schedule or experts or json or follow),
        (follow, "--follow is how a run stands", schedule or experts or json or bool(out)),
    ):
        if flag and others:
            raise bad_argument(name, f"echelon observe {run} {name.split()[0]}")
    if mirror is not None:
        if schedule or experts or serve or follow or out:
            name = "--mirror gives a run to a tracker, and shows nothing of it"
            raise bad_argument(name, f"echelon observe {run} --mirror {mirror}")
        return mirror_in(run, mirror, json)
    files = WrittenFiles.read(out, (DRAWING, *REPORT) if schedule else REPORT)
    if files.has_report:
        files.write_report(run_page(run))
    if serve:
        return _serve(run)
    if follow:
        return follow_run(run)
    if experts:
        return show_experts(run, step, json)
    if not schedule:
        summary = observe_run(run)
        print_result(
            "observe",
            lambda: asdict(summary),
            lambda: fit_page(summary_text(summary), columns=page_columns(WIDEST)),
            as_json=json,
        )
        return 0
    report = observe_schedule(run, step=step, say=note)
    if (svg := files.get(DRAWING)) is not None:
        panels = [
            (f"{title}: {about}", timeline.events) for title, about, timeline, _ in _panels(report)
        ]
        write_new(svg, panels_svg(panels), key=OUT)
        note(f"written: {svg}")
    print_result(
        "observe",
        lambda: report_json(report),
        lambda: report_text(report, width=page_columns(_PIPED), columns=page_columns(WIDEST)),
        as_json=json,
    )
    return 0


def _serve(run: Path) -> int:
    """Serve the page of a run until the user ends it."""
    from threading import Event as Signal

    from echelon.launch.stop import stop_request
    from echelon.page.serve import served_run

    run_page(run)  # What cannot be shown is refused before anything listens.
    with served_run(run) as link:
        print(link, flush=True)
        note("the page follows the run, read-only, for this machine alone; Ctrl-C ends it")
        ended = Signal()
        with stop_request() as stop, stop.answered_by(ended.set, line="{name}: served no longer"):
            ended.wait()
    return 0


def report_text(report: TimelineReport, *, width: int = _PIPED, columns: int = WIDEST) -> str:
    """Return both timelines, one above the other, and the bubble of each by cause.

    Drawings have `width` columns, what is written has `columns` at most.
    """
    plan, pipe = report.plan, report.planned[0].pipeline
    drawn = "" if len(report.planned) == 1 else f"; drawn: ranks {listed(pipe.ranks)}"
    lines = [
        f"{report.run.name}: {pipe.schedule.name} on {plan.mesh.pp} pipeline ranks, "
        f"{pipe.schedule.num_microbatches} microbatches{drawn}",
        "",
    ]
    for title, about, timeline, _ in _panels(report):
        lines += [f"{title}: {about}", draw_timeline(timeline.events, width)]
    for title, _, _, bubble in _panels(report):
        share = f"{100 * bubble.total_fraction:.1f} %"
        table_text = bubble_table(bubble, num_shown=len(pipe.ranks), columns=columns)
        lines += [f"bubble {title}: {share} of the time of all ranks", table_text, ""]
    lines += _closing(report)
    return fit_page("\n".join(lines), columns=columns) + "\n"


def bubble_table(bubble: Bubble, *, num_shown: int, columns: int = WIDEST) -> str:
    """Return milliseconds by cause of the first ranks, and the share of each in all ranks' time."""
    rows: list[tuple[str, ...]] = [
        (
            f"rank {rank.rank}",
            milliseconds(rank.busy_s),
            *(milliseconds(rank.idle_s[cause]) for cause in IdleCause),
        )
        for rank in bubble.ranks[:num_shown]
    ]
    busy = bubble.busy_s / bubble.rank_s if bubble.rank_s else 0.0
    shares = (busy, *(bubble.fraction(cause) for cause in IdleCause))
    rows.append((f"all {len(bubble.ranks)}, %", *(f"{100 * share:.1f}" for share in shares)))
    return table(("ms", "busy", *(cause.value for cause in IdleCause)), rows, columns)


def report_json(report: TimelineReport) -> dict[str, object]:
    """Return the report as JSON: seconds, without the events, which are in the traces."""
    return {
        "run": str(report.run),
        "schedule": report.planned[0].pipeline.schedule.name,
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


def _panels(report: TimelineReport) -> Iterator[tuple[str, str, Timeline, Bubble]]:
    times = f"the medians of {steps_text(sorted(report.measured))}"
    yield "planned", f"simulated with {times}", report.planned[0], report.planned_bubble
    measured = report.measured[report.step][0]
    yield "measured", f"step {report.step}", measured, report.measured_bubble


def _closing(report: TimelineReport) -> list[str]:
    shown, ranks = len(report.planned) * report.plan.mesh.pp, report.plan.mesh.world_size
    some = "" if shown == ranks else f"; {shown} of {ranks} ranks were looked at"
    measured, simulated = milliseconds(report.measured_s), milliseconds(report.simulated_s)
    return [
        f"step      {measured} ms measured, {simulated} ms simulated; median of "
        f"{steps_text(sorted(report.measured))} / simulated = {report.ratio:.3f}{some}",
        f"clocks    aligned by messages, to +- {1e3 * report.clocks.uncertainty_s:.2f} ms",
        f"traces    {report.run / 'traces'}: open them at ui.perfetto.dev",
    ]


def _bubble_json(bubble: Bubble) -> dict[str, object]:
    return {
        "bubble": bubble.total_fraction,
        "by_cause": {cause.value: bubble.fraction(cause) for cause in IdleCause},
        "ranks": [
            {
                "rank": rank.rank,
                "busy_s": rank.busy_s,
                "idle_s": {cause.value: rank.idle_s[cause] for cause in IdleCause},
            }
            for rank in bubble.ranks
        ],
    }


def _require_fitting_flags(schedule: bool, experts: bool, step: int | None) -> None:
    problems: list[Problem] = []
    if schedule and experts:
        message = "--schedule and --experts are two questions"
        problems.append(argument_problem(message, "--schedule", "--experts"))
    if step is not None and not (schedule or experts):
        message = "--step says which step to show of what --schedule or --experts asks for"
        problems.append(
            argument_problem(message, f"--schedule --step {step}", f"--experts --step {step}")
        )
    if problems:
        raise ConfigError(problems)


def summary_text(summary: RunSummary) -> str:
    """Return what became of a run, one fact to a line."""
    return "".join(f"{name:<12}{text}\n" for name, text in run_facts(summary))


def show_experts(run: Path, step: int | None, json: bool) -> int:
    """Print where the tokens of a step of a run went."""
    spots = observe_experts(run, step=step)
    print_result(
        "observe",
        lambda: hotspots_json(spots),
        lambda: hotspots_text(spots, columns=page_columns(WIDEST)),
        as_json=json,
    )
    return 0


def hotspots_text(spots: ExpertHotspots, *, columns: int = WIDEST) -> str:
    """Return the tokens of each expert by layer, then what stands out."""
    experts = spots.plan.model.experts
    assert experts is not None, "a run without experts is refused before"
    each = experts.num_experts <= _SHOWN
    loads = range(experts.num_experts) if each else ("most", "fewest")
    header = ("layer", "imbalance", "busiest", *(str(one) for one in loads), "dropped")
    worst, mean = spots.worst, spots.layers[0].mean
    lines = [
        f"step {spots.step} of {spots.run.name}: tokens that chose each expert "
        f"({mean:.0f} where all have as many)",
        "",
        table(header, [_row(load, each=each) for load in spots.layers], columns),
        "",
        f"hottest     expert {worst.busiest} of layer {worst.layer}: {max(worst.counts)} tokens, "
        f"{worst.imbalance:.2f} times the mean",
    ]
    idle = [
        f"{load.layer}.{expert}"
        for load in spots.layers
        for expert, count in enumerate(load.counts)
        if count == 0
    ]
    if idle:
        more = f" and {len(idle) - _SHOWN} more" if len(idle) > _SHOWN else ""
        lines.append(f"idle        layer.expert {', '.join(idle[:_SHOWN])}{more}")
    share = 100 * spots.dropped / max(1, spots.assignments)
    lines.append(f"dropped     {spots.dropped} of {spots.assignments} assignments, {share:.1f} %")
    lines.append(f"received    {_received(spots)}")
    return fit_page("\n".join(lines), columns=columns) + "\n"


def hotspots_json(spots: ExpertHotspots) -> dict[str, object]:
    """Return the same as JSON."""
    return {
        "run": str(spots.run),
        "step": spots.step,
        "layers": [{name: getattr(load, name) for name in _LOAD_FACTS} for load in spots.layers],
        "received_bytes": {str(rank): count for rank, count in spots.received_bytes.items()},
    }


def _row(load: RecordedLoad, *, each: bool) -> tuple[object, ...]:
    counts = load.counts if each else (max(load.counts), min(load.counts))
    return (load.layer, f"{load.imbalance:.2f}", load.busiest, *counts, load.dropped)


def _received(spots: ExpertHotspots) -> str:
    if spots.plan.mesh.ep == 1:
        return "nothing: every rank has all experts"
    if not spots.received_bytes:
        return "not known: the run has no events of this step"
    by_rank = spots.received_bytes
    rank, most = max(by_rank.items(), key=lambda item: item[1])
    mean = sum(by_rank.values()) / len(by_rank)
    return (
        f"{binary_bytes(most)} at most at once, by rank {rank} "
        f"(one microbatch of one layer; the mean of ranks is {binary_bytes(round(mean))})"
    )


def mirror_in(run: Path, tracker: str, json: bool) -> int:
    """Mirror a run in a tracker, and print how it stands."""
    if tracker not in TRACKERS:
        known = did_you_mean(tracker, TRACKERS) or tuple(TRACKERS)
        raise bad_argument(
            f"--mirror {tracker}: no such tracker", *(f"--mirror {one}" for one in known)
        )
    status = mirror_run(run, tracker)
    print_result(
        "observe",
        lambda: {"run": str(run), **asdict(status)},
        lambda: f"{status.says()}\n",
        as_json=json,
    )
    return 0


def follow_run(path: Path, *, wait: Callable[[float], None] = sleep) -> int:
    """Show how the run at `path` stands until its last step is done; Ctrl-C ends it before.

    ConfigError where there is no run, or its metrics cannot be read.
    """
    follower, screen = RunFollower(path), _Screen(sys.stdout)
    while True:
        new = follower.look()
        now = follower.now()
        if new or not screen.shown:
            screen.show([now.status(), *now.curves(screen.columns, screen.marks)])
        if now.finished:
            return 0
        wait(LOOK_S)


class _Screen:
    """Lines that are drawn over the ones before on a terminal; elsewhere the first of them."""

    def __init__(self, stream: TextIO) -> None:
        self.shown = False
        self._stream = stream
        self._over = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lines = 0

    @property
    def columns(self) -> int:
        """Return the columns of a line: a terminal must not wrap it, or it can't be drawn over."""
        return min(get_terminal_size().columns, WIDEST) - 1

    @property
    def marks(self) -> str:
        """Return the marks of curves that the stream can write."""
        try:
            UNICODE.encode(self._stream.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return ASCII
        return ASCII if os.environ.get("TERM") in ("dumb", "linux") else UNICODE

    def show(self, lines: list[str]) -> None:
        """Draw lines; what was there before is gone."""
        self.shown = True
        if not self._over:
            print(lines[0], file=self._stream, flush=True)
            return
        back = f"\x1b[{self._lines}F\x1b[J" if self._lines else ""
        cut = [line[: self.columns] for line in lines]
        print(back + "\n".join(cut), file=self._stream, flush=True)
        self._lines = len(cut)
