"""The report of a run's schedule gives back what made the run; what is not there is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.schedule.action import ActionKind
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import simulate
from echelon.telemetry.bubble import IdleCause, bubble_from_timelines
from echelon.telemetry.recorded_steps import RecordedSteps
from echelon.telemetry.schedule_report import TimelineReport, read_schedule_report, require_pipeline
from echelon.telemetry.timeline import (
    ClockOffsets,
    measured_timelines,
    pipelines_from_plan,
    planned_timelines,
)
from tests.telemetry.recorded_runs import TAIL_S, plan_of, stage_times, write_run
from tests.telemetry.runs import plain_events

EVEN = stage_times(1.0, 1.0)
SLOW = stage_times(1.0, 1.5, transfer_s=0.125)


def _refused(error: pytest.ExceptionInfo[ConfigError], rule: str) -> str:
    (problem,) = error.value.problems
    assert problem.rule == rule
    return problem.render()


def test_a_run_that_is_what_the_simulator_says_has_ratio_1(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: SLOW, 2: SLOW, 3: SLOW}], clocks={1: -40.0})
    report = read_schedule_report(run.path)
    assert report.step == 3
    assert sorted(report.measured) == [1, 2, 3]
    assert report.clocks.uncertainty_s <= 0.125
    # What clocks do not tell apart is on one side of the pipeline or on the other.
    assert report.ratio == pytest.approx(1.0, abs=0.02)
    planned, measured = report.planned_bubble, report.measured_bubble
    assert planned.total_fraction == pytest.approx(measured.total_fraction, abs=0.01)


SEVERAL_STAGES = [
    plan_of("pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2"),
    plan_of("pipeline.schedule=breadth-first", "pipeline.virtual_stages=2"),
    plan_of("pipeline.schedule=zb-v"),
    plan_of("pipeline.schedule=dualpipe", "mesh.dp_replicate=2"),
    plan_of("pipeline.schedule=dualpipe", pp=4),
    plan_of("pipeline.schedule=dualpipe-v", "model.layers=8", pp=4),
]


@pytest.mark.parametrize("plan", SEVERAL_STAGES, ids=lambda plan: plan.layout.pipeline.schedule)
def test_numbers_are_right_where_ranks_hold_several_stages_or_mirrored_ones(
    tmp_path: Path, plan: Plan
) -> None:
    schedule, pipes = schedule_from_plan(plan), pipelines_from_plan(plan)
    # Links that nothing waits for as long as the clocks of ranks may be apart.
    forward_s = [1.0 + 0.25 * (stage % 3) for stage in range(schedule.num_stages)]
    times = stage_times(*forward_s, transfer_s=1e-3)
    run = write_run(tmp_path, plan, [{1: times, 2: times}], clocks={1: -40.0})
    report = read_schedule_report(run.path)
    ran = {(action.kind, action.stage) for row in schedule.actions for action in row}
    for kind, found, expected in (
        (ActionKind.F, report.durations.forward_s, times.forward_s),
        (ActionKind.BW, report.durations.backward_s, times.backward_s),
        (ActionKind.B, report.durations.input_gradient_s, times.input_gradient_s),
        (ActionKind.W, report.durations.weight_gradient_s, times.weight_gradient_s),
    ):
        here = [s if (kind, stage) in ran else 0.0 for stage, s in enumerate(expected)]
        assert found == pytest.approx(here), kind
    simulated = simulate(schedule, times)
    spread_s = 2 * report.clocks.uncertainty_s + 1e-9
    for bubble in (report.planned_bubble, report.measured_bubble):
        assert [rank.rank for rank in bubble.ranks] == [r for pipe in pipes for r in pipe.ranks]
        busy_s = [rank.busy_s for rank in bubble.ranks]
        assert busy_s == pytest.approx([*simulated.busy_s] * len(pipes))
    assert report.measured_s == pytest.approx(simulated.makespan_s, abs=spread_s)
    # What the clocks of the run itself say of a step is what was simulated, cause by cause.
    clocks = ClockOffsets(
        offset_s={r: -40.0 * (r == 1) for r in range(plan.mesh.world_size)}, uncertainty_s=0.0
    )
    step = RecordedSteps(run.path, range(plan.mesh.world_size)).read(2)
    measured = bubble_from_timelines(measured_timelines(pipes, step, clocks))
    planned = bubble_from_timelines(planned_timelines(pipes, times))
    for cause in set(IdleCause) - {IdleCause.TAIL}:
        assert measured.idle_s(cause) == pytest.approx(planned.idle_s(cause), abs=1e-6), cause
    tail_s = TAIL_S if plan.mesh.dp > 1 else 0.0
    assert measured.idle_s(IdleCause.TAIL) == pytest.approx(tail_s * plan.mesh.world_size)


def test_a_slow_step_is_seen_beside_the_medians_of_all(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: EVEN, 2: EVEN, 3: stage_times(1.0, 3.0)}])
    report = read_schedule_report(run.path)
    assert report.measured_s > 2 * report.simulated_s
    assert report.ratio == pytest.approx(1.0, abs=0.01)
    assert report.measured_bubble.idle_s(IdleCause.IMBALANCE) > 10
    assert report.planned_bubble.idle_s(IdleCause.IMBALANCE) == pytest.approx(0.0, abs=1e-3)


def test_the_tail_of_data_ranks_is_measured_only(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of("mesh.dp_replicate=2"), [{1: EVEN}])
    report = read_schedule_report(run.path)
    assert report.planned_bubble.idle_s(IdleCause.TAIL) == 0
    assert report.measured_bubble.idle_s(IdleCause.TAIL) == pytest.approx(4 * TAIL_S)


def test_a_step_is_read_with_those_of_its_own_start(tmp_path: Path) -> None:
    starts = [{1: SLOW, 2: SLOW, 3: SLOW, 4: SLOW}, {4: EVEN, 5: EVEN}]
    run = write_run(tmp_path, plan_of(), starts, clocks={0: 3.0})

    def read(step: int | None) -> TimelineReport:
        return read_schedule_report(run.path, step=step)

    assert (read(None).step, sorted(read(None).measured)) == (5, [4, 5])
    assert sorted(read(3).measured) == [1, 2, 3]
    assert sorted(read(4).measured) == [4]


def test_a_step_that_was_not_recorded_is_refused_with_those_that_are(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: EVEN, 2: EVEN, 3: EVEN}])
    with pytest.raises(ConfigError) as error:
        read_schedule_report(run.path, step=9)
    text = _refused(error, "step-recorded")
    assert "step 9" in text
    assert "it has steps 1 to 3" in text
    assert "works here: 1, 2 or 3" in text


def test_a_step_that_a_kill_cut_short_is_skipped_or_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: EVEN, 2: EVEN, 3: EVEN}])
    path = plain_events(run.path, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-12]) + lines[-12][:20])
    report = read_schedule_report(run.path)
    assert (report.step, report.newest) == (2, 3)
    with pytest.raises(ConfigError) as error:
        read_schedule_report(run.path, step=3)
    assert "step 3" in (text := _refused(error, "step-recorded"))
    assert "it has steps 1 to 2" in text


def test_a_step_of_other_actions_is_skipped_or_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: EVEN, 2: EVEN, 3: EVEN}])
    path = plain_events(run.path, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if b'"kind":"BW"' in line)
    moved = re.sub(rb'"stage":\d+', b'"stage":7', lines[last])
    for changed in ([], [lines[last], lines[last]], [moved]):
        path.write_bytes(b"".join([*lines[:last], *changed, *lines[last + 1 :]]))
        assert read_schedule_report(run.path).step == 2
        with pytest.raises(ConfigError) as error:
            read_schedule_report(run.path, step=3)
        text = _refused(error, "step-recorded")
        assert "does not have the actions of its plan's schedule" in text


def test_a_start_of_which_no_step_was_recorded_is_not_passed_over(tmp_path: Path) -> None:
    starts = [{1: EVEN, 2: EVEN}, {3: SLOW, 4: SLOW}]
    run = write_run(tmp_path, plan_of(), starts, silent=[(), (1,)])
    with pytest.raises(ConfigError) as error:
        read_schedule_report(run.path)
    text = _refused(error, "step-recorded")
    assert "step 4" in text
    assert "works here: 1 or 2" in text
    assert read_schedule_report(run.path, step=2).step == 2


def test_ranks_without_events_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: EVEN}])
    plain_events(run.path, 1).unlink()
    with pytest.raises(ConfigError) as error:
        read_schedule_report(run.path)
    assert "has no events of ranks 1; its plan has 2 ranks" in _refused(error, "run-has-events")
    plain_events(run.path, 0).unlink()
    with pytest.raises(ConfigError) as error:
        read_schedule_report(run.path)
    assert "has no events at all" in _refused(error, "run-has-events")


def test_no_step_at_all_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: EVEN}])
    for rank in (0, 1):
        plain_events(run.path, rank).write_bytes(b"")
    with pytest.raises(ConfigError) as error:
        read_schedule_report(run.path)
    assert "no whole step" in _refused(error, "step-recorded")


@pytest.mark.parametrize("line", [b'{"kind":"F"}\n', b"[]\n", b"???\n"])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: bytes) -> None:
    run = write_run(tmp_path, plan_of(), [{1: EVEN}])
    path = plain_events(run.path, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(ConfigError) as error:
        read_schedule_report(run.path)
    assert str(path) in _refused(error, "events-readable")


def test_a_run_without_a_pipeline_has_none_to_draw(tmp_path: Path) -> None:
    require_pipeline(plan_of(), tmp_path)
    with pytest.raises(ConfigError) as error:
        require_pipeline(plan_of(pp=1), tmp_path)
    assert "ran with pp = 1 on 1 rank:" in _refused(error, "run-is-pipelined")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_schedule_report(tmp_path / "nano")
    _refused(error, "run-exists")


def test_a_step_that_was_left_out_is_refused_with_its_neighbours(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{1: EVEN, 2: EVEN, 8: EVEN, 16: EVEN, 24: EVEN}])
    with pytest.raises(ConfigError) as error:
        read_schedule_report(run.path, step=9)
    text = _refused(error, "step-recorded")
    assert "it has steps 1 to 2, 8, 16, 24" in text
    assert "works here: 2, 8 or 16" in text
    assert read_schedule_report(run.path).step == 24
