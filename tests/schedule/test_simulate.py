"""The simulator: the numbers of the literature, and the model that it states."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from echelon.core.event import Event
from echelon.schedule.action import Action, Schedule
from echelon.schedule.build import SCHEDULES, build_schedule, builder_of
from echelon.schedule.check import check_schedule
from echelon.schedule.messages import ScheduleMessages
from echelon.schedule.simulate import Durations, Simulation, simulate
from tests.schedule.examples import SEEDS, runnable_schedules, schedule_of


def _uniform(name: str, p: int, m: int, *, backward_s: float, transfer_s: float = 0) -> Simulation:
    stages = SCHEDULES[name].stages_for(p, SCHEDULES[name].default_virtual_stages)
    schedule = build_schedule(name, num_stages=stages, num_ranks=p, num_microbatches=m)
    durations = Durations.uniform(stages, backward_s=backward_s, transfer_s=transfer_s)
    return simulate(schedule, durations)


@pytest.mark.system("S20")
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("backward_s", "slots"), [(1, 14), (2, 21)])
def test_four_stages_and_four_microbatches_take_14_or_21_slots(
    name: str, backward_s: float, slots: int
) -> None:
    result = _uniform(name, 4, 4, backward_s=backward_s)
    assert result.makespan_s == slots
    assert result.bubble_fraction == pytest.approx(3 / 7)
    assert result.bubble_overhead == pytest.approx(0.75)


@pytest.mark.system("S18")
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_naive_leaves_every_rank_idle_for_all_but_its_share(p: int) -> None:
    result = _uniform("naive", p, 5, backward_s=2)
    assert result.bubble_fraction == pytest.approx((p - 1) / p)
    assert result.idle_s == (result.makespan_s * (p - 1) / p,) * p


@pytest.mark.system("S20")
@pytest.mark.parametrize(
    ("p", "m", "overhead", "fraction"),
    [
        (4, 4, 0.75, 0.4286),
        (8, 8, 0.875, 0.4667),
        (8, 32, 0.2188, 0.1795),
        (4, 512, 0.0059, 0.0058),
    ],
)
def test_both_definitions_of_the_bubble(p: int, m: int, overhead: float, fraction: float) -> None:
    for name in ("gpipe", "1f1b"):
        builder = builder_of(name, num_stages=p, num_ranks=p, num_microbatches=m)
        result = simulate(builder.schedule(), Durations.uniform(p))
        for value in (builder.bubble_overhead(), result.bubble_overhead):
            assert value == pytest.approx(overhead, abs=5e-5)
        for value in (builder.bubble_fraction(), result.bubble_fraction):
            assert value == pytest.approx(fraction, abs=5e-5)


@pytest.mark.parametrize(("p", "fraction"), [(2, 0.1111), (4, 0.1579), (8, 0.1795), (16, 0.1899)])
def test_four_microbatches_per_stage_leave_almost_a_fifth(p: int, fraction: float) -> None:
    assert _uniform("1f1b", p, 4 * p, backward_s=2).bubble_fraction == pytest.approx(
        fraction, abs=5e-5
    )


@pytest.mark.parametrize(
    ("m", "ratio", "gpipe_total", "f1b_total"),
    [(8, 1.0, 64, 36), (32, 4.0, 256, 36), (64, 8.0, 512, 36)],
)
def test_peak_activations_of_gpipe_over_1f1b_with_eight_stages(
    m: int, ratio: float, gpipe_total: int, f1b_total: int
) -> None:
    gpipe, f1b = (
        check_schedule(
            build_schedule(name, num_stages=8, num_ranks=8, num_microbatches=m)
        ).peak_in_flight_per_rank
        for name in ("gpipe", "1f1b")
    )
    assert max(gpipe) / max(f1b) == ratio
    assert (sum(gpipe), sum(f1b)) == (gpipe_total, f1b_total)


def test_1f1b_holds_fewer_at_each_later_stage() -> None:
    builder = builder_of("1f1b", num_stages=4, num_ranks=4, num_microbatches=8)
    assert [builder.peak_in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]


def _random_durations(schedule: Schedule, seed: int) -> Durations:
    rng = random.Random(seed)

    def some(count: int) -> tuple[float, ...]:
        return tuple(float(rng.randint(0, 9)) for _ in range(count))

    n = schedule.num_stages
    return Durations(
        forward_s=some(n),
        backward_s=some(n),
        input_gradient_s=some(n),
        weight_gradient_s=some(n),
        transfer_s=some(n - 1),
        message_bytes=rng.randint(1, 99),
    )


def _by_name(events: tuple[Event, ...]) -> dict[str, Event]:
    return {event.name: event for event in events}


@given(runnable_schedules, SEEDS)
def test_every_action_starts_as_soon_as_its_rank_and_its_message_allow(
    schedule: Schedule, seed: int
) -> None:
    durations = _random_durations(schedule, seed)
    events = _by_name(simulate(schedule, durations).events)
    traffic = ScheduleMessages.from_schedule(schedule)
    for rank, steps in enumerate(traffic.steps):
        free = 0.0
        for step in steps:
            event = events[str(step.action)]
            arrival = 0.0 if step.receive is None else events[str(step.receive)].end
            assert event.rank == rank
            assert event.start == max(free, arrival)
            assert event.end == event.start + durations.seconds_of(step.action)
            free = event.end


@given(runnable_schedules, SEEDS)
def test_every_send_starts_as_soon_as_it_is_made_and_its_link_is_free(
    schedule: Schedule, seed: int
) -> None:
    durations = _random_durations(schedule, seed)
    events = _by_name(simulate(schedule, durations).events)
    traffic = ScheduleMessages.from_schedule(schedule)
    maker = {step.send: step.action for steps in traffic.steps for step in steps if step.send}
    for messages in traffic.channels.values():
        free = 0.0
        for message in messages:
            event = events[str(message)]
            boundary = min(message.source_stage, message.target_stage)
            assert event.start == max(free, events[str(maker[message])].end)
            assert event.end == event.start + durations.transfer_s[boundary]
            assert (event.kind, event.axis, event.rank) == ("send", "pp", message.source_rank)
            assert event.bytes == durations.message_bytes
            free = event.end


@given(runnable_schedules, SEEDS)
def test_busy_and_idle_time_fill_the_step_of_every_rank(schedule: Schedule, seed: int) -> None:
    durations = _random_durations(schedule, seed)
    result = simulate(schedule, durations)
    for rank, (busy, idle) in enumerate(zip(result.busy_s, result.idle_s, strict=True)):
        assert busy == sum(durations.seconds_of(action) for action in schedule.actions[rank])
        assert busy + idle == result.makespan_s
    assert len(result.events) == sum(map(len, schedule.actions)) + sum(
        map(len, ScheduleMessages.from_schedule(schedule).channels.values())
    )
    assert [e.start for e in result.events] == sorted(e.start for e in result.events)
    assert simulate(schedule, durations.without_transfers()).makespan_s <= result.makespan_s


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_transfers_that_nothing_hides_lengthen_the_step(name: str) -> None:
    free = _uniform(name, 4, 8, backward_s=2)
    slow = _uniform(name, 4, 8, backward_s=2, transfer_s=0.5)
    # ZB-H2 hides the way back behind the weight gradients that its last ranks run late.
    ways = 1 if name == "zb-h2" else 2
    assert slow.makespan_s >= free.makespan_s + ways * 3 * 0.5
    assert slow.busy_s == free.busy_s


def test_gpipe_hides_all_transfers_but_the_first_and_the_last() -> None:
    free = _uniform("gpipe", 4, 8, backward_s=2)
    slow = _uniform("gpipe", 4, 8, backward_s=2, transfer_s=0.5)
    assert slow.makespan_s == free.makespan_s + 2 * 3 * 0.5


def test_a_slow_link_becomes_the_bottleneck() -> None:
    result = _uniform("gpipe", 2, 10, backward_s=2, transfer_s=7)
    sends = [event for event in result.events if event.kind == "send" and event.rank == 0]
    assert [event.start for event in sends] == [1 + 7 * k for k in range(10)]


def test_one_rank_has_no_bubble_and_sends_nothing() -> None:
    result = _uniform("1f1b", 1, 3, backward_s=2)
    assert (result.makespan_s, result.bubble_fraction, result.bubble_overhead) == (9, 0, 0)
    assert {event.kind for event in result.events} == {"F", "BW"}


def test_events_carry_the_cell_and_the_rank() -> None:
    schedule = schedule_of("F0.0 B0.0 W0.0", "F1.0 BW1.0", num_microbatches=1)
    durations = Durations.uniform(2, forward_s=1, backward_s=4, transfer_s=0.25)
    events = _by_name(simulate(schedule, durations).events)
    weight = events[str(Action.parse("W0.0"))]
    assert (weight.kind, weight.stage, weight.microbatch, weight.rank) == ("W", 0, 0, 0)
    assert (weight.start, weight.end) == (8.5, 10.5)
    assert events["gradient 0 stage 1 -> 0"].start == events["BW1.0"].end == 6.25


def test_a_step_without_any_duration_has_no_bubble() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=1)
    result = simulate(schedule, Durations.uniform(2, forward_s=0, backward_s=0))
    assert (result.makespan_s, result.bubble_fraction, result.bubble_overhead) == (0, 0, 0)
