"""What ranks recorded becomes one timeline, on one clock, of the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.event import Event
from echelon.core.plan import Plan
from echelon.telemetry.recorded_steps import RecordedStep, RecordedSteps
from echelon.telemetry.timeline import (
    ClockOffsets,
    align_clocks,
    clock_offsets_from_steps,
    is_whole,
    measured_durations,
    measured_timelines,
    pipelines_from_plan,
    planned_timelines,
)
from tests.telemetry.recorded_runs import TAIL_S, events_of_step, plan_of, stage_times, write_run


def _step(plan: Plan, *clocks: float, transfer_s: float = 0.25) -> RecordedStep:
    durations = stage_times(1.0, 2.0, transfer_s=transfer_s)
    events = events_of_step(plan, durations, begin=0.0)
    return RecordedStep(
        number=1,
        start=0,
        events={
            rank: tuple(_behind(event, clocks[rank] if clocks else 0.0) for event in events[rank])
            for rank in events
        },
    )


def _behind(event: Event, seconds: float) -> Event:
    return replace(event, start=event.start - seconds, end=event.end - seconds)


def _names(events: Sequence[Event]) -> set[str]:
    return {event.name for event in events}


@given(st.floats(min_value=-1e4, max_value=1e4))
@settings(deadline=None)
def test_clocks_that_differ_are_aligned_by_messages(offset: float) -> None:
    plan = plan_of()
    clocks = clock_offsets_from_steps(pipelines_from_plan(plan), [_step(plan, 0.0, offset)])
    # Messages go both ways and take 0.25 s, and the last rank is waited for by all.
    assert 0 < clocks.uncertainty_s <= 0.25 + 1e-6
    found = clocks.offset_s[1] - clocks.offset_s[0]
    assert found == pytest.approx(offset, abs=clocks.uncertainty_s + 1e-6)


@pytest.mark.slow
@given(st.lists(st.floats(min_value=-100, max_value=100), min_size=8, max_size=8))
@settings(deadline=None)
def test_no_message_arrives_before_it_was_sent(offsets: list[float]) -> None:
    plan = plan_of("mesh.dp_replicate=2", pp=4)
    pipes = pipelines_from_plan(plan)
    events = events_of_step(plan, stage_times(1.0, 2.0, 1.0, 1.5, transfer_s=0.1), begin=0.0)
    step = RecordedStep(
        number=1,
        start=0,
        events={
            rank: tuple(_behind(event, offsets[rank]) for event in events[rank]) for rank in events
        },
    )
    for line in measured_timelines(pipes, step, clock_offsets_from_steps(pipes, [step])):
        at = {event.name: event for event in line.actions}
        for message in (event for event in line.events if event.kind == "send"):
            ahead = 1 if message.name.startswith("activation") else -1
            kind = "F" if ahead == 1 else "BW"
            assert message.stage is not None
            user = at[f"{kind}{message.stage + ahead}.{message.microbatch}"]
            assert message.start <= user.start + 1e-6
            assert message.end <= user.start + 1e-6


def test_more_steps_align_clocks_better_but_not_those_of_long_ago() -> None:
    plan = plan_of()
    near, far = _step(plan, transfer_s=0.25), _step(plan, transfer_s=0.125)

    def uncertainty_s(*steps: RecordedStep) -> float:
        return clock_offsets_from_steps(pipelines_from_plan(plan), steps).uncertainty_s

    later = {rank: [_behind(e, -1000.0) for e in near.events[rank]] for rank in near.events}
    late = RecordedStep(number=9, start=0, events={r: tuple(es) for r, es in later.items()})
    assert uncertainty_s(far, near) == uncertainty_s(far) < uncertainty_s(near)
    assert uncertainty_s(far, late) == pytest.approx(uncertainty_s(near))


def test_a_measured_step_holds_the_events_of_a_planned_one() -> None:
    plan = plan_of()
    pipes, step = pipelines_from_plan(plan), _step(plan)
    measured = measured_timelines(pipes, step, clock_offsets_from_steps(pipes, [step]))
    planned = planned_timelines(pipes, stage_times(1.0, 2.0))
    assert _names(measured[0].events) == _names(planned[0].events)
    assert min(event.start for event in measured[0].actions) == 0.0
    assert measured[0].others == ()


def test_gradients_are_complete_when_data_ranks_have_summed_them() -> None:
    plan = plan_of("mesh.dp_replicate=2")
    pipes, step = pipelines_from_plan(plan), _step(plan, 0.0, 0.0, 0.0, 0.0)
    assert [pipe.ranks for pipe in pipes] == [(0, 2), (1, 3)]
    exact = ClockOffsets(offset_s=dict.fromkeys(range(4), 0.0), uncertainty_s=0.0)
    for timeline in measured_timelines(pipes, step, exact):
        assert timeline.gradients_s == pytest.approx(timeline.span_s + TAIL_S)
        assert _names(timeline.others) == {"gradients.bucket0"}


def test_medians_of_what_was_measured_are_the_times_that_it_was_made_of() -> None:
    plan = plan_of()
    pipes, step = pipelines_from_plan(plan), _step(plan)
    exact = ClockOffsets(offset_s={0: 0.0, 1: 0.0}, uncertainty_s=0.0)
    durations = measured_durations(measured_timelines(pipes, step, exact))
    assert durations.forward_s == pytest.approx((1.0, 2.0))
    assert durations.backward_s == pytest.approx((2.0, 4.0))
    assert durations.transfer_s == pytest.approx((0.25,))
    assert durations.message_bytes == 64
    # Nothing ran B or W, so nothing is known of them.
    assert durations.input_gradient_s == durations.weight_gradient_s == (0.0, 0.0)


def test_what_follows_a_step_is_no_part_of_it(tmp_path: Path) -> None:
    plan = plan_of()
    times = stage_times(1.0, 1.0)
    run = write_run(tmp_path, plan, [{1: times, 2: times}], validates=True)
    steps = RecordedSteps(run.path, [0, 1])
    assert steps.numbers == (1, 2)
    for number in steps.numbers:
        step = steps.read(number)
        assert is_whole(pipelines_from_plan(plan)[0], step)
        assert [event.name for event in step.events[1][-2:]] == ["step", "optimizer"]


def test_a_step_that_was_taken_again_is_the_last_one_taken(tmp_path: Path) -> None:
    plan = plan_of()
    slow, fast = stage_times(2.0, 2.0), stage_times(1.0, 1.0)
    starts = [{1: slow, 2: slow, 3: slow}, {2: fast, 3: fast}]
    steps = RecordedSteps(write_run(tmp_path, plan, starts).path, [0, 1])
    assert steps.numbers == (1, 2, 3)
    assert [steps.read(number).start for number in steps.numbers] == [0, 1, 1]


def test_only_whole_pipelines_are_shown_and_at_least_one() -> None:
    plan = plan_of("mesh.dp_replicate=4")
    assert [pipe.ranks for pipe in pipelines_from_plan(plan, most_ranks=5)] == [(0, 4), (1, 5)]
    assert [pipe.ranks for pipe in pipelines_from_plan(plan, most_ranks=1)] == [(0, 4)]
    assert len(pipelines_from_plan(plan)) == 4


def gather(rank: int, start: float, end: float) -> tuple[Event, ...]:
    return (
        Event(kind="all_gather", axis="world", name="step", rank=rank, start=start, end=end),
        Event(kind="step", name="1 a", rank=rank),
    )


def step_of(**times: tuple[float, float]) -> RecordedStep:
    """Return a step in which each rank is in the gather from one time to another."""
    events = {int(name[1:]): gather(int(name[1:]), *both) for name, both in times.items()}
    return RecordedStep(number=1, events=events, start=0)


def test_a_gather_bounds_each_clock_by_the_other() -> None:
    # Rank 1 began its clock 5 s later: 10 to 12 on rank 0 is 5.5 to 7 on its own.
    found = align_clocks([step_of(r0=(10.0, 12.0), r1=(5.5, 7.0))], [], [])
    # 10 <= 7 + o and 5.5 + o <= 12: o is in 3 to 6.5, of which the middle is taken.
    assert found.offset_s == {0: 0.0, 1: pytest.approx(4.75)}
    assert found.uncertainty_s == pytest.approx(1.75)


def test_a_later_step_tightens_the_bounds() -> None:
    steps = [step_of(r0=(10.0, 12.0), r1=(5.5, 7.0)), step_of(r0=(13.0, 13.1), r1=(8.0, 8.1))]
    found = align_clocks(steps, [], [])
    assert found.offset_s[1] == pytest.approx(5.0)
    assert found.uncertainty_s == pytest.approx(0.1)


def test_bounds_of_long_ago_are_left_out_for_clocks_drift() -> None:
    steps = [step_of(r0=(0.0, 0.1), r1=(0.0, 0.1)), step_of(r0=(13.0, 15.0), r1=(8.0, 10.0))]
    found = align_clocks(steps, [], [])
    assert found.offset_s[1] == pytest.approx(5.0)
    assert found.uncertainty_s == pytest.approx(2.0)
