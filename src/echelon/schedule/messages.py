"""What crosses ranks: the sends and receives that a schedule implies, in order.

Nothing about communication is written in a schedule. An activation goes from stage s to stage
s+1 after F, a gradient from stage s+1 to stage s after B or BW; neighbour stages on one rank hand
over locally and send nothing. The executor, the checker and the simulator all read this file, so
what is proved is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from echelon.schedule.action import Action, ActionKind, Schedule


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

    def __str__(self) -> str:
        """Return the short form: ``activation 3 stage 0 -> 1``."""
        stages = f"{self.source_stage} -> {self.target_stage}"
        return f"{self.payload.value} {self.microbatch} stage {stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action with what it waits for and what it gives away.

    `receive` is the message that must have arrived before the action starts, `send` the one to
    post when it has ended. `local_input` and `local_output` say that the neighbour stage is on
    this rank and takes the tensor as it is. With neither, a forward pass starts from the data or
    ends in the loss, and a backward pass starts from the loss or ends at the embedding. W takes
    and gives nothing: it uses what B of the same stage left.
    """

    action: Action
    receive: Message | None
    send: Message | None
    local_input: bool
    local_output: bool


def rank_steps(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """Return the actions of `rank` in order, each with its messages."""
    return tuple(step_of(schedule, action) for action in schedule.actions[rank])


def step_of(schedule: Schedule, action: Action) -> Step:
    """Return `action` with the message that it needs and the one that it yields, if any."""
    if action.kind is ActionKind.W:
        return Step(action=action, receive=None, send=None, local_input=False, local_output=False)
    ahead = 1 if action.kind is ActionKind.F else -1
    before, after = action.stage - ahead, action.stage + ahead
    receive = _message(schedule, action, before, action.stage)
    send = _message(schedule, action, action.stage, after)
    stages = range(schedule.num_stages)
    return Step(
        action=action,
        receive=receive,
        send=send,
        local_input=before in stages and receive is None,
        local_output=after in stages and send is None,
    )


Channel = tuple[int, int]
"""A source rank and a target rank."""


def channels(schedule: Schedule) -> dict[Channel, tuple[Message, ...]]:
    """Return the messages of each channel in the order in which the source rank posts them.

    The target rank posts its receives in this same order, as a transport without tags (NCCL)
    demands: to get a message that is not the next of its channel, it first receives those before
    it and keeps them.
    """
    posted: dict[Channel, list[Message]] = {}
    for rank in range(schedule.num_ranks):
        for step in rank_steps(schedule, rank):
            if step.send is not None:
                posted.setdefault((rank, step.send.target_rank), []).append(step.send)
    return {channel: tuple(messages) for channel, messages in posted.items()}


def receives(schedule: Schedule) -> tuple[tuple[tuple[Message, ...], ...], ...]:
    """Return, per rank and action, the receives to post at the latest before it, in order.

    Mostly one or none; more where the message that the action needs is not the next of its
    channel. A receive may be posted earlier (to overlap it with compute), never out of order.
    """
    sent = channels(schedule)
    place = {message: k for messages in sent.values() for k, message in enumerate(messages)}
    posted = dict.fromkeys(sent, 0)
    rows: list[tuple[tuple[Message, ...], ...]] = []
    for rank in range(schedule.num_ranks):
        row: list[tuple[Message, ...]] = []
        for step in rank_steps(schedule, rank):
            if step.receive is None:
                row.append(())
                continue
            channel = (step.receive.source_rank, rank)
            end = max(posted[channel], place[step.receive] + 1)
            row.append(sent[channel][posted[channel] : end])
            posted[channel] = end
        rows.append(tuple(row))
    return tuple(rows)


def _message(schedule: Schedule, action: Action, source: int, target: int) -> Message | None:
    stages = range(schedule.num_stages)
    if source not in stages or target not in stages:
        return None
    source_rank, target_rank = schedule.stage_ranks[source], schedule.stage_ranks[target]
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
