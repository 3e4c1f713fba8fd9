"""The chart of a pipeline: the actions that the schedule has, when the simulator has them."""

from __future__ import annotations

from echelon.page.documents.plan import KINDS, chart_from_timelines, schedule_section
from echelon.planner.view.document import ScheduleFigure
from echelon.telemetry.timeline import pipelines_from_plan, planned_timelines
from tests.telemetry.recorded_runs import plan_of, stage_times


def test_every_action_is_drawn_when_it_is_simulated() -> None:
    plan = plan_of(pp=2)
    lines = planned_timelines(pipelines_from_plan(plan), stage_times(1.0, 1.5, transfer_s=0.25))
    chart = chart_from_timelines("planned", lines[:1])
    schedule = lines[0].pipeline.schedule
    events = {event.name: event for event in lines[0].actions}
    for lane, actions, rank in zip(chart.lanes, schedule.actions, (0, 1), strict=True):
        assert lane.label == f"rank {rank}"
        drawn = zip(lane.kinds, lane.stages, lane.microbatches, lane.starts, lane.ends, strict=True)
        for (kind, stage, microbatch, start, end), action in zip(drawn, actions, strict=True):
            event = events[str(action)]
            assert (KINDS[kind], stage, microbatch) == (
                action.kind.value,
                action.stage,
                action.microbatch,
            )
            assert (start, end) == (event.start, event.end)
    assert chart.span_s == max(lane.ends[-1] for lane in chart.lanes)
    section = schedule_section(plan, (chart,))
    assert isinstance(section.figure, ScheduleFigure)
    assert chart.bubble_text in section.summary
    assert section.table is not None
    assert [row[1] for row in section.table.rows] == ["rank 0", "rank 1"]
    assert "drain" in section.table.rows[1][3]
