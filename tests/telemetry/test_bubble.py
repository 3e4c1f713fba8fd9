"""Every idle second has one cause, whatever the schedule; each cause is what it says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.event import Event
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.simulate import Durations, simulate
from echelon.telemetry.bubble import Bubble, IdleCause, bubble_from_timelines
from echelon.telemetry.timeline import RunPipeline, Timeline, planned_timelines
from tests.schedule.examples import SEEDS, mirrored_schedules, runnable_schedules, schedule_of
from tests.telemetry.recorded_runs import stage_times


def _built(seed: int) -> Schedule:
    """Return a schedule of some builder, of a size that it takes."""
    rng = random.Random(seed)
    builder = SCHEDULES[rng.choice(sorted(SCHEDULES))]
    ranks = rng.choice([p for p in (2, 3, 4, 6) if builder.fits_ranks(p)])
    virtual = rng.choice([v for v in (1, 2, 3) if builder.fits_virtual_stages(v)])
    least = builder.minimum_microbatches(ranks)
    allowed = [m for m in range(least, 4 * ranks + 1) if builder.allows_microbatches(ranks, m)]
    return build_schedule(
        builder.name,
        num_stages=builder.stages_for(ranks, virtual),
        num_ranks=ranks,
        num_microbatches=rng.choice(allowed),
    )


SCHEDULES_OF_ALL_KINDS = st.one_of(runnable_schedules, mirrored_schedules, SEEDS.map(_built))
"""Any placement, order and split; some microbatches the other way round; and what is built."""


def _pipe(schedule: Schedule) -> RunPipeline:
    return RunPipeline(schedule=schedule, ranks=tuple(range(schedule.num_ranks)))


def _planned(schedule: Schedule, durations: Durations) -> Timeline:
    return planned_timelines([_pipe(schedule)], durations)[0]


def _bubble(name: str, durations: Durations, *, m: int) -> Bubble:
    p = len(durations.forward_s)
    schedule = build_schedule(name, num_stages=p, num_ranks=p, num_microbatches=m)
    return bubble_from_timelines([_planned(schedule, durations)])


def _random_durations(schedule: Schedule, rng: random.Random) -> Durations:
    def some(count: int) -> tuple[float, ...]:
        return tuple(rng.choice((0.0, rng.uniform(0.1, 5.0))) for _ in range(count))

    stages = schedule.num_stages
    return Durations(
        forward_s=some(stages),
        backward_s=some(stages),
        input_gradient_s=some(stages),
        weight_gradient_s=some(stages),
        transfer_s=some(stages - 1),
    )


def _run_by_hand(schedule: Schedule, rng: random.Random) -> Timeline:
    """Return a valid step in which each action takes its own time and ranks dawdle in between."""
    planned = simulate(schedule, _random_durations(schedule, rng))
    late = 0.0
    events: list[Event] = []
    for event in sorted(planned.events, key=lambda event: (event.start, event.end)):
        # All that follows moves too, so that nothing starts before what it needs.
        late += rng.uniform(0.0, 0.5)
        longer = rng.uniform(0.0, 0.1)
        events.append(replace(event, start=event.start + late, end=event.end + late + longer))
        late += longer
    last = max(event.end for event in events if event.kind != "send")
    tail = rng.choice((0.0, rng.uniform(0.0, 3.0)))
    return Timeline(pipeline=_pipe(schedule), events=tuple(events), gradients_s=last + tail)


def _assert_every_idle_second_has_a_cause(timeline: Timeline) -> None:
    actions = timeline.actions
    begin = min(event.start for event in actions)
    window_s = max(timeline.gradients_s, *(event.end for event in actions)) - begin
    bubble = bubble_from_timelines([timeline])
    assert bubble.rank_s == pytest.approx(window_s * len(bubble.ranks))
    for rank in bubble.ranks:
        busy_s = sum(event.end - event.start for event in actions if event.rank == rank.rank)
        assert rank.busy_s == pytest.approx(busy_s)
        assert sum(rank.idle_s.values()) == pytest.approx(window_s - busy_s, abs=1e-9)
        assert min(rank.idle_s.values()) >= -1e-9


@given(SCHEDULES_OF_ALL_KINDS, SEEDS)
@settings(deadline=None)
def test_causes_add_up_to_the_idle_time_of_a_planned_step(schedule: Schedule, seed: int) -> None:
    durations = _random_durations(schedule, random.Random(seed))
    timeline = _planned(schedule, durations)
    _assert_every_idle_second_has_a_cause(timeline)
    bubble = bubble_from_timelines([timeline])
    assert bubble.idle_s(IdleCause.BETWEEN) == pytest.approx(0.0, abs=1e-9)
    assert bubble.idle_s(IdleCause.TAIL) == 0.0
    assert [sum(rank.idle_s.values()) for rank in bubble.ranks] == pytest.approx(
        list(simulate(schedule, durations).idle_s), abs=1e-9
    )


@given(SCHEDULES_OF_ALL_KINDS, SEEDS)
@settings(deadline=None)
def test_causes_add_up_to_the_idle_time_of_a_step_as_it_ran(schedule: Schedule, seed: int) -> None:
    rng = random.Random(seed)
    _assert_every_idle_second_has_a_cause(_run_by_hand(schedule, rng))


@given(SCHEDULES_OF_ALL_KINDS)
@settings(deadline=None)
def test_equal_stages_and_free_transfers_leave_only_what_the_schedule_makes(
    schedule: Schedule,
) -> None:
    bubble = bubble_from_timelines([_planned(schedule, Durations.uniform(schedule.num_stages))])
    for cause in set(IdleCause) - {IdleCause.FILL, IdleCause.SCHEDULE, IdleCause.DRAIN}:
        assert bubble.idle_s(cause) == pytest.approx(0.0, abs=1e-9), cause


def test_1f1b_of_equal_stages_fills_and_drains_and_waits_for_its_first_backward() -> None:
    bubble = _bubble("1f1b", stage_times(1.0, 1.0, 1.0, 1.0), m=4)
    assert [rank.idle_s[IdleCause.FILL] for rank in bubble.ranks] == [0, 1, 2, 3]
    assert [rank.idle_s[IdleCause.SCHEDULE] for rank in bubble.ranks] == [9, 6, 3, 0]
    assert [rank.idle_s[IdleCause.DRAIN] for rank in bubble.ranks] == [0, 2, 4, 6]
    assert bubble.total_fraction == pytest.approx(3 / 7)


def test_a_heavy_last_stage_is_an_imbalance_of_the_ranks_before_it() -> None:
    even = _bubble("1f1b", stage_times(1.0, 1.0), m=8)
    heavy = _bubble("1f1b", stage_times(1.0, 2.0), m=8)
    assert even.idle_s(IdleCause.IMBALANCE) == 0
    assert heavy.ranks[0].idle_s[IdleCause.IMBALANCE] > 15
    assert heavy.ranks[1].idle_s[IdleCause.IMBALANCE] == 0


def test_a_slow_link_is_a_wait_for_transfer_and_no_imbalance() -> None:
    fast = _bubble("gpipe", stage_times(1.0, 1.0), m=4)
    slow = _bubble("gpipe", stage_times(1.0, 1.0, transfer_s=0.5), m=4)
    # An activation on its way out makes the gradient late that the other one brings back.
    assert slow.ranks[0].idle_s[IdleCause.TRANSFER] == pytest.approx(1.0)
    assert slow.ranks[1].idle_s[IdleCause.FILL] == pytest.approx(
        fast.ranks[1].idle_s[IdleCause.FILL] + 0.5
    )
    assert slow.idle_s(IdleCause.SCHEDULE) == pytest.approx(fast.idle_s(IdleCause.SCHEDULE))
    assert slow.idle_s(IdleCause.IMBALANCE) == pytest.approx(0.0, abs=1e-9)


@given(SCHEDULES_OF_ALL_KINDS, SEEDS)
@settings(deadline=None)
def test_free_transfers_are_not_waited_for(schedule: Schedule, seed: int) -> None:
    durations = _random_durations(schedule, random.Random(seed)).without_transfers()
    bubble = bubble_from_timelines([_planned(schedule, durations)])
    assert bubble.idle_s(IdleCause.TRANSFER) == pytest.approx(0.0, abs=1e-9)


@given(SCHEDULES_OF_ALL_KINDS, SEEDS)
@settings(deadline=None)
def test_equal_stages_have_no_imbalance_over_any_links(schedule: Schedule, seed: int) -> None:
    links = _random_durations(schedule, random.Random(seed)).transfer_s
    durations = replace(Durations.uniform(schedule.num_stages), transfer_s=links)
    bubble = bubble_from_timelines([_planned(schedule, durations)])
    assert bubble.idle_s(IdleCause.IMBALANCE) == pytest.approx(0.0, abs=1e-9)


def test_a_message_may_leave_before_its_action_ends() -> None:
    row = "F0.0 BW0.0", "F1.0 BW1.0"
    schedule = schedule_of(*row, num_microbatches=1)
    times = {"F0.0": (0, 1), "F1.0": (1, 2), "BW1.0": (2, 5), "BW0.0": (3.5, 6)}
    posted = {"activation 0 stage 0 -> 1": 1, "gradient 0 stage 1 -> 0": 3}
    events = [
        Event(kind=name[:-3], name=name, stage=int(name[-3]), start=s, end=e, rank=int(name[-3]))
        for name, (s, e) in times.items()
    ]
    events += [Event(kind="send", name=name, start=s, end=s) for name, s in posted.items()]
    timeline = Timeline(pipeline=_pipe(schedule), events=tuple(events), gradients_s=6.0)
    (first, last) = bubble_from_timelines([timeline]).ranks
    # Its maker was at work on the message for two seconds, and half of one it was on its way.
    assert first.idle_s[IdleCause.SCHEDULE] == pytest.approx(2.0)
    assert first.idle_s[IdleCause.TRANSFER] == pytest.approx(0.5)
    assert first.idle_s[IdleCause.IMBALANCE] == pytest.approx(0.0)
    assert last.idle_s[IdleCause.DRAIN] == pytest.approx(1.0)
    _assert_every_idle_second_has_a_cause(timeline)


def test_the_tail_is_what_follows_the_last_action_of_all_ranks() -> None:
    schedule = build_schedule("1f1b", num_stages=2, num_ranks=2, num_microbatches=2)
    planned = _planned(schedule, stage_times(1.0, 1.0))
    bubble = bubble_from_timelines([replace(planned, gradients_s=planned.gradients_s + 1.5)])
    assert [rank.idle_s[IdleCause.TAIL] for rank in bubble.ranks] == [1.5, 1.5]
    assert bubble.rank_s == pytest.approx(2 * (planned.span_s + 1.5))


def test_several_pipelines_add_up() -> None:
    schedule = build_schedule("1f1b", num_stages=2, num_ranks=2, num_microbatches=2)
    pipes = [RunPipeline(schedule=schedule, ranks=ranks) for ranks in ((0, 2), (1, 3))]
    timelines = planned_timelines(pipes, stage_times(1.0, 1.0))
    both, one = bubble_from_timelines(timelines), bubble_from_timelines(timelines[:1])
    assert [rank.rank for rank in both.ranks] == [0, 2, 1, 3]
    assert both.rank_s == 2 * one.rank_s
    assert both.total_fraction == pytest.approx(one.total_fraction)
