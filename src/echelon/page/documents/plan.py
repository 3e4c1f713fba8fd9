# SPDX-License-Identifier: Apache-2.0
"""The page of a plan: where ranks are, what they hold and send, where the seconds of a step go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from echelon.core.event import Event
from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan
from echelon.core.units import binary_bytes, short_count
from echelon.cost.seconds.unit_times import UnitTimes, stage_durations, unit_times_from_formulas
from echelon.planner.lint.checks import plan_fits
from echelon.planner.predict.bands import held_bytes_band, mfu_band, step_band, tokens_per_s_band
from echelon.planner.predict.estimate import Estimate, estimate_plan
from echelon.planner.report.sections import (
    held_sections,
    message_sections,
    note_sections,
    run_sections,
    step_section,
)
from echelon.planner.view.document import (
    DataTable,
    Fact,
    PageDocument,
    ScheduleChart,
    ScheduleFigure,
    ScheduleLane,
    Section,
)
from echelon.telemetry.bubble import RankBubble, bubble_from_timelines
from echelon.telemetry.timeline import Timeline, pipelines_from_plan, planned_timelines

PLANNED = "planned"

KINDS = ("F", "B", "W", "BW")
MOST_ACTIONS = 40_000
"""Actions of a chart: so many are some megabytes of a page."""
KIND_WORDS = ("forward", "input gradient", "weight gradient", "backward")


def plan_page(
    plan: Plan, times: UnitTimes | None = None, estimate: Estimate | None = None
) -> PageDocument:
    """Return the page of a plan, its stages timed by `times`, or modelled.

    `estimate`: the numbers of a search, perhaps for another trainer.
    """
    estimate = estimate or estimate_plan(plan, times)
    return PageDocument(
        title=f"{plan.name}: plan",
        subject=subject_of_plan(plan),
        verdict=_verdict(plan, estimate),
        good=plan_fits(plan),
        facts=tuple(_facts(plan, estimate)),
        sections=(*plan_sections(plan, estimate, times),),
    )


def subject_of_plan(plan: Plan) -> str:
    """Return what a plan is about: a model on a cluster, and its hash."""
    count = short_count(num_parameters(plan.model))
    return (
        f"{plan.model.name}, {count} parameters, on {plan.mesh.world_size:,} ranks of "
        f"{plan.cluster.name}; plan {plan.content_hash()[:12]}"
    )


def plan_sections(
    plan: Plan, estimate: Estimate, times: UnitTimes | None = None
) -> Iterator[Section]:
    """Yield the parts that every page of a plan has."""
    yield from run_sections(plan)
    yield from held_sections(plan, estimate)
    yield step_section(estimate)
    if plan.num_stages > 1:
        durations = stage_durations(plan, times or unit_times_from_formulas(plan))
        lines = planned_timelines(pipelines_from_plan(plan), durations)
        yield schedule_section(plan, (chart_from_timelines(PLANNED, lines[:1]),))
    yield from message_sections(plan)
    yield from note_sections(plan)


def _verdict(plan: Plan, estimate: Estimate) -> str:
    """Return the sentence at the top."""
    memory = plan.cluster.device.memory_bytes
    held = estimate.bytes_held
    share = f"{100 * held / memory:.1f} %" if memory else "-"
    says = "fits" if plan_fits(plan) else "does not fit"
    return (
        f"The plan {says}: its fullest rank holds {binary_bytes(held)} of {binary_bytes(memory)} "
        f"({share}), and a step takes {estimate.step_s:.4g} s."
    )


def _facts(plan: Plan, estimate: Estimate) -> Iterator[Fact]:
    step, held = step_band(estimate), held_bytes_band(estimate)
    tokens, mfu = tokens_per_s_band(estimate), mfu_band(estimate)
    yield Fact("step", f"{step.value:.4g} s", f"{step.low:.4g} to {step.high:.4g}")
    yield Fact(
        "tokens/s of a device", f"{tokens.value:,.0f}", f"{tokens.low:,.0f} to {tokens.high:,.0f}"
    )
    yield Fact(
        "MFU (full attention)",
        f"{100 * mfu.value:.1f} %",
        f"{100 * mfu.low:.1f} to {100 * mfu.high:.1f}; causal {100 * estimate.causal_mfu:.1f} %",
    )
    yield Fact(
        "memory of the fullest rank",
        binary_bytes(held.value),
        f"{binary_bytes(held.low)} to {binary_bytes(held.high)}",
    )
    yield Fact(
        "global batch",
        f"{plan.mathematics.global_sequences:,} sequences",
        f"of {plan.mathematics.sequence_length:,} tokens",
    )


def schedule_section(plan: Plan, charts: Sequence[ScheduleChart]) -> Section:
    """Return the part that draws charts of one pipeline under one another."""
    said = "; ".join(f"{one.name}: {one.span_text}, {one.bubble_text}" for one in charts)
    pipeline = plan.layout.pipeline
    return Section(
        id="schedule",
        title="The schedule of a pipeline",
        summary=f"{pipeline.schedule}, {plan.mesh.pp} ranks, {plan.num_microbatches} microbatches. "
        f"{said}.",
        figure=ScheduleFigure(kinds=KIND_WORDS, charts=tuple(charts)),
        table=DataTable(
            head=("chart", "rank", "actions", "idle"),
            rows=tuple(
                (chart.name, lane.label, str(len(lane.kinds)), lane.idle_text)
                for chart in charts
                for lane in chart.lanes
            ),
            right=(2,),
        ),
    )


def chart_from_timelines(name: str, timelines: Sequence[Timeline]) -> ScheduleChart:
    """Return the chart of pipelines in one step, a lane for each of their ranks.

    Of very many actions each rank's first are drawn, on a scale that ends with them.
    """
    bubble = bubble_from_timelines(timelines)
    idle = {one.rank: one for one in bubble.ranks}
    by_rank: dict[int, list[Event]] = {
        rank: [] for timeline in timelines for rank in timeline.pipeline.ranks
    }
    for timeline in timelines:
        for action in timeline.actions:
            by_rank[action.rank].append(action)
    whole = max(timeline.span_s for timeline in timelines)
    most, count = MOST_ACTIONS // len(by_rank), max(map(len, by_rank.values()))
    lanes = [
        _lane(rank, sorted(actions, key=attrgetter("start"))[:most], idle[rank])
        for rank, actions in by_rank.items()
    ]
    few = count > most
    some = f"; the first {most:,} of {count:,} actions of each rank are drawn" if few else ""
    return ScheduleChart(
        name=name,
        lanes=tuple(lanes),
        span_s=max(max(lane.ends, default=0.0) for lane in lanes) if few else whole,
        span_text=f"{whole:.4g} s from the first action to the last",
        bubble_text=f"ranks are idle for {100 * bubble.total_fraction:.1f} % of the time{some}",
    )


def _lane(rank: int, own: Sequence[Event], bubble: RankBubble) -> ScheduleLane:
    return ScheduleLane(
        label=f"rank {rank}",
        kinds=tuple(KINDS.index(one.kind) for one in own),
        stages=tuple(one.stage or 0 for one in own),
        microbatches=tuple(one.microbatch or 0 for one in own),
        starts=tuple(one.start for one in own),
        ends=tuple(one.end for one in own),
        idle_text=_idle_text(bubble),
    )


def _idle_text(bubble: RankBubble) -> str:
    """Return the causes of a rank's idle time, the longest first."""
    causes = sorted(
        ((seconds, cause) for cause, seconds in bubble.idle_s.items() if seconds > 0),
        key=lambda pair: -pair[0],
    )
    return ", ".join(f"{cause.value} {seconds:.4g} s" for seconds, cause in causes) or "never"
