# SPDX-License-Identifier: Apache-2.0
"""The page of a run, from its folder alone: what it was planned to do, and what it did.

Where the folder has a proof or a rehearsal, they are parts of the page, too. Of many steps so many
are drawn that the page stays small: evenly spaced ones, the last among them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.core.errors import ConfigError, EchelonError
from echelon.core.plan import Plan
from echelon.core.rulebook.run import EVENTS_READABLE
from echelon.core.serialize import decode_json
from echelon.core.units import binary_bytes, short_count
from echelon.page.documents.curves import curve_sections
from echelon.page.documents.plan import chart_from_timelines, schedule_section, subject_of_plan
from echelon.page.documents.proof import proof_sections
from echelon.page.documents.rehearsal import rehearsal_sections
from echelon.planner.predict.estimate import Estimate, estimate_plan
from echelon.planner.report.sections import memory_section, step_section
from echelon.planner.report.sent import sent_figure
from echelon.planner.view.document import BarRow, BarsFigure, DataTable, Fact, PageDocument, Section
from echelon.planner.view.mesh_map import mesh_section
from echelon.telemetry.bound import Bound, StepBound
from echelon.telemetry.events import METRICS_FILE
from echelon.telemetry.json_lines import last_of_each_step, read_entries
from echelon.telemetry.run_directory import RunDirectory, open_run
from echelon.telemetry.schedule_report import read_schedule_report
from echelon.telemetry.summary import RunSummary, summarize_run

NOTES_SHOWN = 8  # notes
MOST_CHARACTERS = 4000
"""Characters of what a file says of a machine or a command."""


def run_page(path: Path) -> PageDocument:
    """Return the page of a run folder; ConfigError where it is none, or its files are damaged."""
    run = open_run(path)
    plan, summary = run.plan(), summarize_run(path)
    estimate = estimate_plan(plan)
    return PageDocument(
        title=f"{run.name}: run",
        subject=subject_of_plan(plan),
        verdict=_verdict(summary),
        good=summary.steps >= summary.total_steps,
        facts=tuple(_facts(summary, estimate, _sharing(run, plan))),
        sections=tuple(_sections(run, plan, summary, estimate)),
    )


def summary_page(summary: RunSummary) -> PageDocument:
    """Return what a run did in numbers alone, without its folder and so without its figures."""
    return PageDocument(
        title=f"{summary.name}: run",
        subject=f"plan {summary.plan_hash[:12]}",
        verdict=_verdict(summary),
        good=summary.steps >= summary.total_steps,
        facts=tuple(_facts(summary, None)),
        sections=(_facts_section(summary),),
    )


def _verdict(summary: RunSummary) -> str:
    done = "finished" if summary.steps >= summary.total_steps else "is not finished"
    learned = ""
    if summary.first_loss is not None and summary.last_loss is not None:
        learned = f": loss {summary.first_loss:.4f} to {summary.last_loss:.4f}"
    return f"The run {done}, {summary.steps:,} of {summary.total_steps:,} steps{learned}."


def _sharing(run: RunDirectory, plan: Plan) -> str:
    """Number of ranks that share the cores of a host; empty with a core for each rank."""
    cores = _environment(run).get("usable_cores")
    ranks = -(-plan.mesh.world_size // plan.cluster.nodes)
    if plan.cluster.backend != "gloo" or not isinstance(cores, int | float) or cores >= ranks:
        return ""
    return f"{ranks} ranks share {cores:g} core{'s' * (cores != 1)}"


def _facts(summary: RunSummary, estimate: Estimate | None, sharing: str = "") -> Iterator[Fact]:
    if summary.step_s is not None:
        note = ""
        if estimate is not None:
            ratio = summary.step_s / estimate.step_s
            note = f"planned {estimate.step_s:.4g} s: {ratio:.2f} times"
            note += f"; {sharing}" if sharing else ""
        yield Fact("step, median", f"{summary.step_s:.4g} s", note)
    if summary.tokens_per_s is not None:
        yield Fact("tokens/s", short_count(summary.tokens_per_s), "median")
    if summary.peak_bytes is not None:
        yield Fact("most memory of a rank", binary_bytes(summary.peak_bytes))
    if summary.last_validation is not None and summary.first_validation is not None:
        yield Fact(
            "validation loss",
            f"{summary.last_validation:.4f}",
            f"first {summary.first_validation:.4f}",
        )
    if summary.bound is not None:
        share = summary.bound.share(summary.bound.seconds[summary.bound.binds])
        yield Fact("bound by", summary.bound.binds.value, f"{100 * share:.1f} %")
    if summary.recorded:
        there, _, which = summary.recorded.partition(": ")
        yield Fact("events", f"{there} steps", which)
    if summary.starts > 1:
        yield Fact("started", f"{summary.starts} times")


def run_facts(summary: RunSummary) -> list[tuple[str, str]]:
    """Return what became of a run: a word, or an empty one, and what is to be said of it."""
    facts = [
        ("run", f"{summary.name}, plan {summary.plan_hash}"),
        ("steps", f"{summary.steps} of {summary.total_steps}"),
    ]
    if summary.starts > 1:
        facts.append(("started", f"{summary.starts} times"))
    if summary.first_loss is not None and summary.last_loss is not None:
        facts.append(("loss", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}"))
    if summary.num_validations == 1:
        facts.append(("validation", f"{summary.last_validation:.4f}"))
    elif summary.first_validation is not None and summary.last_validation is not None:
        both = f"{summary.first_validation:.4f} -> {summary.last_validation:.4f}"
        facts.append(("validation", both))
    if summary.first_imbalance is not None and summary.last_imbalance is not None:
        both = f"{summary.first_imbalance:.2f}x -> {summary.last_imbalance:.2f}x"
        dropped = 100 * (summary.dropped_share or 0.0)
        facts.append(("experts", f"imbalance {both} (worst layer), {dropped:.1f} % dropped"))
    for one in summary.staleness:
        counts = ", ".join(f"{stale} x {count}" for stale, count in one.histogram.items())
        facts.append(
            (f"worker {one.worker}", f"staleness x gradients: {counts}; {one.mean:.2f} in the mean")
            if one.num_applied
            else (f"worker {one.worker}", "no gradient was applied, or there are no events")
        )
    facts += _round_facts(summary)
    if summary.step_s is not None and summary.tokens_per_s is not None:
        rate = short_count(summary.tokens_per_s)
        facts.append(("step", f"{milliseconds(summary.step_s)} ms, {rate} tokens/s (medians)"))
    if summary.bound is not None:
        facts += _bound_facts(summary.bound)
    if summary.recorded:
        facts.append(("events", summary.recorded))
    if summary.peak_bytes is not None:
        facts.append(("memory", f"{binary_bytes(summary.peak_bytes)} at most on a rank"))
    if summary.checkpoints:
        facts.append(("checkpoints", listed(summary.checkpoints)))
    return facts


def _round_facts(summary: RunSummary) -> list[tuple[str, str]]:
    """Return how islands met, and which workers or islands were lost and came back."""
    facts: list[tuple[str, str]] = []
    if (rounds := summary.rounds) is not None:
        told = (
            f"{rounds.rounds} of {rounds.every} steps; rank 0 sent {rounds.mean_bytes:,.0f} bytes"
        )
        planned = f"({rounds.planned_bytes:,.0f} by the formulas)"
        facts.append(("rounds", f"{told} over dp_replicate in a mean step {planned}"))
        if rounds.short_rounds:
            fewer = f"{rounds.short_rounds} with fewer than {rounds.islands} islands"
            facts.append(("", f"{fewer}, {rounds.fewest} at the least"))
    facts += [("mirror", one.says()) for one in summary.mirrors]
    facts += [("note", text) for text in summary.notes[:NOTES_SHOWN]]
    if (more := len(summary.notes) - NOTES_SHOWN) > 0:
        facts.append(("", f"and {more} more notes in metrics.jsonl"))
    return facts


def _bound_facts(bound: StepBound) -> list[tuple[str, str]]:
    """Return what binds, by how much, and the milliseconds of a step by what they went to."""
    first, second = bound.binds, bound.second
    ahead = f"{100 * bound.share(bound.margin_s):.1f} points more than {second.value}"
    parts = ", ".join(f"{one.value} {milliseconds(bound.seconds[one])}" for one in Bound)
    waits = ", ".join(f"{axis} {milliseconds(seconds)}" for axis, seconds in bound.waits_s.items())
    found = [
        ("bound by", f"{first.value}: {100 * bound.share(bound.seconds[first]):.1f} %, {ahead}"),
        ("", f"{parts} ms of a rank's step (medians of {steps_text(bound.steps)})"),
    ]
    return [*found, ("waits", f"{waits} ms by axis")] if waits else found


def steps_text(numbers: Sequence[int]) -> str:
    """Steps by their numbers: "step 3", or "steps 3, 4"."""
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {listed(numbers)}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, without their unit."""
    return f"{1e3 * seconds:.2f}"


def listed(numbers: Sequence[int]) -> str:
    """Numbers with commas between them."""
    return ", ".join(map(str, numbers))


def _sections(
    run: RunDirectory, plan: Plan, summary: RunSummary, estimate: Estimate
) -> Iterator[Section]:
    entries = [*read_entries(run.path / METRICS_FILE)]
    steps = last_of_each_step(one for one in entries if one.text("kind") == "step")
    validations = last_of_each_step(one for one in entries if one.text("kind") == "validation")
    if steps:
        yield from curve_sections(steps, validations, estimate)
    if summary.bound is not None:
        yield _bound_section(summary.bound)
    if plan.mesh.pp > 1:
        yield _schedule(run, plan)
    yield step_section(estimate)
    yield memory_section(plan, estimate)
    if plan.mesh.world_size > 1:
        yield mesh_section(plan)
        yield sent_figure(plan)
    for name, sections_of in _BESIDE.items():
        if (path := run.path / name).is_file():
            yield from _read(path, sections_of)
    yield _facts_section(summary)
    yield _again_section(run)


def _schedule(run: RunDirectory, plan: Plan) -> Section:
    """Return the schedule, planned and measured, or why there is none; the rest stands."""
    try:
        report = read_schedule_report(run.path)
    except EchelonError as error:
        why = error.problems[0].message
        return Section(
            id="schedule", title="The schedule of a pipeline", summary=f"Not drawn: {why}"
        )
    measured = report.measured[report.step][:1]
    charts = [
        chart_from_timelines("simulated with the measured times", report.planned[:1]),
        chart_from_timelines(f"measured, step {report.step}", measured),
    ]
    return schedule_section(plan, charts)


def _bound_section(bound: StepBound) -> Section:
    kinds = tuple(one.value for one in Bound)
    values = tuple(bound.seconds[one] for one in Bound)
    total = sum(values)
    texts = tuple(f"{value:.4g} s" for value in values)
    steps = f"{bound.steps[0]} to {bound.steps[-1]}"
    return Section(
        id="bound",
        title="What a step spends its time on, as measured",
        summary=f"{bound.binds.value} binds: {100 * bound.share(bound.seconds[bound.binds]):.1f} % "
        f"of a rank's step, {100 * bound.share(bound.margin_s):.1f} points more than "
        f"{bound.second.value} (medians of steps {steps}).",
        figure=BarsFigure(
            kinds=kinds,
            rows=(BarRow.of("a rank's step", values, lambda value: f"{value:.4g} s"),),
        ),
        table=DataTable(
            head=("what", "seconds", "share"),
            rows=tuple(
                (name, text, f"{100 * value / total:.1f} %" if total else "-")
                for name, text, value in zip(kinds, texts, values, strict=True)
            ),
            right=(1, 2),
        ),
    )


def _facts_section(summary: RunSummary) -> Section:
    return Section(
        id="run",
        title="What became of the run",
        summary="Its steps, what binds them, what was lost, and what it left.",
        table=DataTable(head=("", "what"), rows=tuple(run_facts(summary))),
    )


def _again_section(run: RunDirectory) -> Section:
    """Return how the run is done again: the command that started it, and where it ran."""
    where = _environment(run)
    command = where.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    started = [_cut(shlex.join(["echelon", *words[1:]]))] if words else []
    packages = where.get("packages")
    versions = (
        ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        if isinstance(packages, dict)
        else ""
    )
    return Section(
        id="again",
        title="How to do it again",
        summary=_cut(
            f"Echelon {where.get('echelon', '?')}, Python {where.get('python', '?')}, "
            f"{versions or 'packages not written'}; "
            f"{where.get('platform', 'platform not written')}."
        ),
        commands=(*started, f"echelon train {run.name}/run.toml", f"echelon prove {run.name}"),
    )


def _cut(text: str) -> str:
    """Return text, or its beginning where it is longer than anybody wrote."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


_BESIDE: Mapping[str, Callable[[Mapping[str, Any]], Sequence[Section]]] = {
    "proof.json": proof_sections,
    "rehearsal.json": rehearsal_sections,
}
"""What other commands leave in the folder of a run, and the parts that it fills."""


def _read(
    path: Path, sections_of: Callable[[Mapping[str, Any]], Sequence[Section]]
) -> Sequence[Section]:
    """Return the parts that a file fills; ConfigError where it was changed after it was written."""
    try:
        return sections_of(decode_json(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            EVENTS_READABLE.problem(
                f"{path} is not what Echelon writes: {type(error).__name__}: {error}",
                suggestions=[f"remove {path.name}, or write it again"],
            )
        ) from error


def _environment(run: RunDirectory) -> Mapping[str, Any]:
    """Return what the run says that it ran on; nothing where it does not."""
    path = run.path / "environment.json"
    if not path.is_file():
        return {}

    def known(found: Mapping[str, Any]) -> Sequence[Section]:
        kept.update(found)
        return ()

    kept: dict[str, Any] = {}
    _read(path, known)
    return kept
