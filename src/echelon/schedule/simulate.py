# SPDX-License-Identifier: Apache-2.0
"""Time a schedule event by event: when each action and each transfer starts and ends.

The model: a rank runs its list from left to right, one action at a time; an action starts when the
one before it has ended and the message that it needs has arrived. A send starts when the action
that made it has ended and the earlier sends of its channel have; it takes no time from the rank
(the transport overlaps it with compute). Each channel is a link of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.axis import Axis
from echelon.core.event import Event
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.messages import Channel, Message, action_with_messages, run_action_lists

KINDS = (ActionKind.F, ActionKind.B, ActionKind.W, ActionKind.BW)
"""The kinds of action in the order of their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Give seconds per stage for each kind of action, and per boundary for a transfer.

    `transfer_s[b]` is one message between stages b and b+1, in either direction: activation and
    gradient have the same size, `message_bytes`. It costs nothing between stages on one rank.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    message_bytes: int = 0

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        transfer_s: float = 0.0,
    ) -> Durations:
        """Return equal stages; B and W each take half of the whole backward pass."""
        half = backward_s / 2
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_s=(backward_s,) * num_stages,
            input_gradient_s=(half,) * num_stages,
            weight_gradient_s=(half,) * num_stages,
            transfer_s=(transfer_s,) * (num_stages - 1),
        )

    def without_transfers(self) -> Durations:
        """Return the same with free transfers: what is left is compute and bubble."""
        return replace(self, transfer_s=(0.0,) * len(self.transfer_s))

    @property
    def by_kind(self) -> tuple[tuple[float, ...], ...]:
        """Return the seconds of all stages for each of `KINDS`."""
        return self.forward_s, self.input_gradient_s, self.weight_gradient_s, self.backward_s

    def seconds_of(self, action: Action) -> float:
        """Return the seconds of one action."""
        return self.by_kind[KINDS.index(action.kind)][action.stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Hold the events of one step, by start time, and what follows from them."""

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Return the seconds that each rank waits between the start and the end of the step."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Return idle time over the time of the whole step, over all ranks."""
        total = self.makespan_s * len(self.busy_s)
        return sum(self.idle_s) / total if total else 0.0

    @property
    def bubble_overhead(self) -> float:
        """Return idle time over busy time, over all ranks."""
        busy = sum(self.busy_s)
        return sum(self.idle_s) / busy if busy else 0.0


def simulate(schedule: Schedule, durations: Durations) -> Simulation:
    """Return when everything happens in one step of a checked `schedule`."""
    order, _ = run_action_lists(schedule)
    assert len(order) == sum(map(len, schedule.actions)), "check_schedule comes first"
    free = [0.0] * schedule.num_ranks
    busy = [0.0] * schedule.num_ranks
    link_free: dict[Channel, float] = {}
    arrived: dict[Message, float] = {}
    events: list[Event] = []
    for action in order:
        step = action_with_messages(schedule, action)
        rank = schedule.rank_of(action.stage, action.microbatch)
        start = free[rank]
        if step.receive is not None:
            start = max(start, arrived.pop(step.receive))
        end = start + durations.seconds_of(action)
        free[rank] = end
        busy[rank] += end - start
        events.append(
            Event(
                kind=action.kind.value,
                name=str(action),
                stage=action.stage,
                microbatch=action.microbatch,
                start=start,
                end=end,
                rank=rank,
            )
        )
        if step.send is not None:
            channel = step.send.channel
            sent = max(end, link_free.get(channel, 0.0))
            boundary = min(step.send.source_stage, step.send.target_stage)
            arrival = sent + durations.transfer_s[boundary]
            link_free[channel] = arrival
            arrived[step.send] = arrival
            events.append(
                Event(
                    kind="send",
                    name=str(step.send),
                    axis=Axis.PP.value,
                    stage=step.send.source_stage,
                    microbatch=step.send.microbatch,
                    bytes=durations.message_bytes,
                    start=sent,
                    end=arrival,
                    rank=rank,
                )
            )
    events.sort(key=lambda event: (event.start, event.end, event.rank))
    return Simulation(events=tuple(events), makespan_s=max(free), busy_s=tuple(busy))
