# SPDX-License-Identifier: Apache-2.0
"""Needs of an action, and messages that a schedule implies: its sends and receives, in order.

Nothing about communication is written in a schedule. An activation goes from stage s to stage
s+1 after F, a gradient from stage s+1 to stage s after B or BW; neighbour stages on one rank hand
over locally and send nothing. The executor, the checker and the simulator all read this file, so
what is proved is what runs.

Dependencies are those of the mathematics, whoever owns the stages:

    F(s, m)        needs F(s-1, m)
    B, BW(s, m)    needs F(s, m), and B or BW(s+1, m)
    W(s, m)        needs B(s, m)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from echelon.schedule.action import Action, ActionKind, Schedule

RECEIVES_AHEAD = 2
"""Actions whose receives are posted before their turn, so that a transfer overlaps compute."""

SENDS_SPARE = 2
"""Sends per link that may be pending beyond those that the schedule needs, to keep it busy."""


class Payload(StrEnum):
    """Name what a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One tensor that goes from a stage to its neighbour on another rank."""

    payload: Payload
    microbatch: int
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int

    @property
    def channel(self) -> Channel:
        """Return the source and the target rank."""
        return self.source_rank, self.target_rank

    def __str__(self) -> str:
        """Return the short form: ``activation 3 stage 0 -> 1``."""
        return message_name(self.payload, self.microbatch, self.source_stage, self.target_stage)


def message_name(payload: Payload, microbatch: int, source: int, target: int) -> str:
    """Name of a message: payload, microbatch, and the stages that make and use it."""
    return f"{payload.value} {microbatch} stage {source} -> {target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionWithMessages:
    """One action with what it waits for and what it gives away.

    `receive` is the message that must have arrived before the action starts, `send` the one to
    post when it has ended. `local_input` and `local_output` say that the neighbour stage is on
    this rank and takes the tensor as it is. With neither, a forward pass starts from the data or
    ends in the loss, and a backward pass starts from the loss or ends at the embedding. W takes
    and gives nothing: it uses what B of the same stage left.
    """

    action: Action
    receive: Message | None = None
    send: Message | None = None
    local_input: bool = False
    local_output: bool = False


def action_with_messages(schedule: Schedule, action: Action) -> ActionWithMessages:
    """Return `action` with the message that it needs and the one that it yields, if any."""
    if action.kind is ActionKind.W:
        return ActionWithMessages(action=action)
    ahead = 1 if action.kind is ActionKind.F else -1
    before, after = action.stage - ahead, action.stage + ahead
    receive = _message(schedule, action, before, action.stage)
    send = _message(schedule, action, action.stage, after)
    stages = range(schedule.num_stages)
    return ActionWithMessages(
        action=action,
        receive=receive,
        send=send,
        local_input=before in stages and receive is None,
        local_output=after in stages and send is None,
    )


Channel = tuple[int, int]
"""A source rank and a target rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMessages:
    """Hold all that the ranks of a schedule send and receive in one step.

    - `steps[r]`: the actions of rank `r` in order, each with its messages.
    - `channels[source, target]`: the messages in the order in which the source rank posts them.
    - `receives[r][i]`: the receives that rank `r` posts at the latest before its action `i`.

    Receives are posted in the order of their channel, as a transport without tags (NCCL) demands.
    So `receives[r][i]` is mostly the message that the action needs, or empty; it is longer where
    others come before that message on its channel (they are received and kept), and empty where
    the message has been received already. A receive may be posted earlier, to overlap it with
    compute, but never out of order.
    """

    steps: tuple[tuple[ActionWithMessages, ...], ...]
    channels: dict[Channel, tuple[Message, ...]]
    receives: tuple[tuple[tuple[Message, ...], ...], ...]

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> ScheduleMessages:
        """Return the traffic of a complete schedule."""
        steps = tuple(
            tuple(action_with_messages(schedule, action) for action in row)
            for row in schedule.actions
        )
        sent: dict[Channel, list[Message]] = {}
        for row in steps:
            for step in row:
                if step.send is not None:
                    sent.setdefault(step.send.channel, []).append(step.send)
        channels = {channel: tuple(messages) for channel, messages in sent.items()}
        return cls(steps=steps, channels=channels, receives=_receives(steps, channels))


def _receives(
    steps: tuple[tuple[ActionWithMessages, ...], ...], channels: dict[Channel, tuple[Message, ...]]
) -> tuple[tuple[tuple[Message, ...], ...], ...]:
    place = {message: k for messages in channels.values() for k, message in enumerate(messages)}
    posted = dict.fromkeys(channels, 0)
    rows: list[tuple[tuple[Message, ...], ...]] = []
    for row in steps:
        received: list[tuple[Message, ...]] = []
        for step in row:
            if step.receive is None:
                received.append(())
                continue
            channel = step.receive.channel
            start, end = posted[channel], place[step.receive] + 1
            received.append(channels[channel][start:end])
            posted[channel] = max(start, end)
        rows.append(tuple(received))
    return tuple(rows)


def _message(schedule: Schedule, action: Action, source: int, target: int) -> Message | None:
    stages = range(schedule.num_stages)
    if source not in stages or target not in stages:
        return None
    source_rank = schedule.rank_of(source, action.microbatch)
    target_rank = schedule.rank_of(target, action.microbatch)
    if source_rank == target_rank:
        return None
    return Message(
        payload=Payload.ACTIVATION if action.kind is ActionKind.F else Payload.GRADIENT,
        microbatch=action.microbatch,
        source_stage=source,
        target_stage=target,
        source_rank=source_rank,
        target_rank=target_rank,
    )


def result_name(action: Action) -> Action:
    """Return the name under which others wait for `action`: BW gives what B gives."""
    if action.kind is ActionKind.BW:
        return Action(ActionKind.B, action.stage, action.microbatch)
    return action


def required_results(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the results that `action` needs; a needed B may be made by a BW."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.F:
        return (Action(ActionKind.F, stage - 1, microbatch),) if stage > 0 else ()
    if action.kind is ActionKind.W:
        return (Action(ActionKind.B, stage, microbatch),)
    own = Action(ActionKind.F, stage, microbatch)
    if stage == num_stages - 1:
        return (own,)
    return (own, Action(ActionKind.B, stage + 1, microbatch))


def run_action_lists(schedule: Schedule) -> tuple[list[Action], list[int]]:
    """Run every rank as far as it comes, each waiting only for what it needs; sends never wait.

    Return every action that runs, each after all that it needs, and of each rank the index of the
    action at which it waits for ever: the length of its list where it finishes.
    """
    done: set[Action] = set()
    order: list[Action] = []
    heads = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        row = schedule.actions[rank]
        while heads[rank] < len(row):
            action = row[heads[rank]]
            needs = required_results(action, schedule.num_stages)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            heads[rank] += 1
            order.append(action)
            result = result_name(action)
            done.add(result)
            ready.extend(waiting.pop(result, ()))
    return order, heads
