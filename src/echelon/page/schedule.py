# SPDX-License-Identifier: Apache-2.0
"""The figure of a pipeline's schedule: what each of its ranks does, planned or measured."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.event import Event
from echelon.core.plan import Plan
from echelon.planner.view.document import (
    DataTable,
    ScheduleChart,
    ScheduleFigure,
    ScheduleLane,
    Section,
)
from echelon.telemetry.bubble import IdleCause, RankBubble, bubble_from_timelines
from echelon.telemetry.timeline import Timeline

KINDS = ("F", "B", "W", "BW")
MOST_ACTIONS = 40_000
"""Actions of a chart: so many are some megabytes of a page."""
KIND_WORDS = ("forward", "input gradient", "weight gradient", "backward")


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
        _lane(rank, sorted(actions, key=_start)[:most], idle[rank])
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


def _start(event: Event) -> float:
    return event.start


def _idle_text(bubble: RankBubble) -> str:
    """Return the causes of a rank's idle time, the longest first."""
    causes = sorted(
        ((seconds, cause) for cause, seconds in bubble.idle_s.items() if seconds > 0),
        key=lambda pair: -pair[0],
    )
    return ", ".join(f"{cause.value} {seconds:.4g} s" for seconds, cause in causes) or "never"


ALL_CAUSES = tuple(cause.value for cause in IdleCause)
