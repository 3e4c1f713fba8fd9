"""What a schedule sends and receives."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.messages import (
    ActionWithMessages,
    Payload,
    ScheduleMessages,
    action_with_messages,
    required_results,
    result_name,
    run_action_lists,
)
from tests.schedule.examples import runnable_schedules, schedule_of


def _said(step: ActionWithMessages) -> tuple[str, str]:
    return str(step.receive or ""), str(step.send or "")


def test_the_middle_stage_receives_and_sends_both_ways() -> None:
    schedule = build_schedule("gpipe", num_stages=3, num_ranks=3, num_microbatches=1)
    forward, backward = ScheduleMessages.from_schedule(schedule).steps[1]
    assert _said(forward) == ("activation 0 stage 0 -> 1", "activation 0 stage 1 -> 2")
    assert _said(backward) == ("gradient 0 stage 2 -> 1", "gradient 0 stage 1 -> 0")


def test_the_ends_start_from_the_data_and_end_in_the_loss() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=1)
    (first, back), (last, loss) = ScheduleMessages.from_schedule(schedule).steps
    assert (first.receive, first.local_input) == (None, False)
    assert (back.send, back.local_output) == (None, False)
    assert (last.send, last.local_output) == (None, False)
    assert (loss.receive, loss.local_input) == (None, False)


def test_neighbours_on_one_rank_hand_over_without_a_message() -> None:
    schedule = schedule_of(
        "F0.0 BW0.0", "F1.0 F2.0 BW2.0 BW1.0", num_microbatches=1, stage_ranks=(0, 1, 1)
    )
    traffic = ScheduleMessages.from_schedule(schedule)
    enter, leave, turn, back = traffic.steps[1]
    assert (enter.local_input, enter.local_output) == (False, True)
    assert (leave.local_input, leave.send) == (True, None)
    assert (turn.local_output, turn.send) == (True, None)
    assert (back.local_input, str(back.send)) == (True, "gradient 0 stage 1 -> 0")
    assert sum(map(len, traffic.channels.values())) == 2


def test_a_weight_gradient_needs_no_message() -> None:
    schedule = schedule_of("F0.0 B0.0 W0.0", "F1.0 B1.0 W1.0", num_microbatches=1)
    step = action_with_messages(schedule, Action(ActionKind.W, 0, 0))
    assert (step.receive, step.send, step.local_input, step.local_output) == (
        None,
        None,
        False,
        False,
    )
    assert (
        str(ScheduleMessages.from_schedule(schedule).steps[0][1].receive)
        == "gradient 0 stage 1 -> 0"
    )


def test_four_stages_send_three_messages_per_microbatch_each_way() -> None:
    schedule = build_schedule("1f1b", num_stages=4, num_ranks=4, num_microbatches=8)
    count = Counter(
        message.payload
        for messages in ScheduleMessages.from_schedule(schedule).channels.values()
        for message in messages
    )
    assert count == {Payload.ACTIVATION: 24, Payload.GRADIENT: 24}


@given(runnable_schedules)
def test_every_send_has_one_receive_in_the_order_of_its_channel(schedule: Schedule) -> None:
    traffic = ScheduleMessages.from_schedule(schedule)
    received: dict[tuple[int, int], list[object]] = {channel: [] for channel in traffic.channels}
    for rank, posts in enumerate(traffic.receives):
        seen: set[object] = set()
        for step, posted in zip(traffic.steps[rank], posts, strict=True):
            for message in posted:
                assert message.target_rank == rank
                received[message.channel].append(message)
            seen.update(posted)
            assert step.receive is None or step.receive in seen
    assert {channel: tuple(messages) for channel, messages in received.items()} == traffic.channels


@given(runnable_schedules)
def test_messages_are_twice_the_microbatches_over_each_boundary_between_ranks(
    schedule: Schedule,
) -> None:
    owners = schedule.stage_ranks
    crossings = sum(a != b for a, b in pairwise(owners))
    total = sum(map(len, ScheduleMessages.from_schedule(schedule).channels.values()))
    assert total == 2 * crossings * schedule.num_microbatches


def test_a_message_that_is_not_next_on_its_channel_waits_for_those_before_it() -> None:
    schedule = schedule_of("F0.0 F0.1 BW0.0 BW0.1", "F1.1 BW1.1 F1.0 BW1.0", num_microbatches=2)
    first, _, third, _ = ScheduleMessages.from_schedule(schedule).receives[1]
    assert [message.microbatch for message in first] == [0, 1]
    assert third == ()


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("F0.3", []),
        ("F1.3", ["F0.3"]),
        ("B0.3", ["F0.3", "B1.3"]),
        ("BW0.3", ["F0.3", "B1.3"]),
        ("B2.3", ["F2.3"]),
        ("BW2.3", ["F2.3"]),
        ("W0.3", ["B0.3"]),
        ("W2.3", ["B2.3"]),
    ],
)
def test_what_an_action_of_three_stages_needs(action: str, needs: list[str]) -> None:
    assert [str(need) for need in required_results(Action.parse(action), 3)] == needs


@pytest.mark.parametrize(
    ("action", "name"), [("F1.2", "F1.2"), ("B1.2", "B1.2"), ("W1.2", "W1.2"), ("BW1.2", "B1.2")]
)
def test_others_wait_for_a_whole_backward_as_for_its_first_half(action: str, name: str) -> None:
    assert str(result_name(Action.parse(action))) == name


def test_ranks_run_as_far_as_they_come() -> None:
    schedule = schedule_of("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1", num_microbatches=2)
    order, heads = run_action_lists(schedule)
    assert sorted(map(str, order)) == ["F0.0", "F1.0"]
    assert heads == [1, 1]


@given(st.sampled_from(["1f1b", "zb-h1", "gpipe"]), st.integers(1, 5), st.integers(0, 5))
def test_each_action_stands_behind_all_that_it_needs(name: str, p: int, extra: int) -> None:
    schedule = build_schedule(name, num_stages=p, num_ranks=p, num_microbatches=p + extra)
    order, heads = run_action_lists(schedule)
    assert heads == [len(row) for row in schedule.actions]
    assert sorted(order, key=str) == sorted((a for row in schedule.actions for a in row), key=str)
    done: set[Action] = set()
    for action in order:
        assert done.issuperset(required_results(action, p))
        done.add(result_name(action))
