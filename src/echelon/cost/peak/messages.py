"""Messages of a pipeline rank that are in its memory, action by action (`parallel/pipeline.py`).

A receive is posted a few actions before the one that takes it, with memory of its own; a send is
kept until the window of its channel has gone on. What goes to a stage on the same rank is kept
until that stage takes it. What an action has taken, and what it gives, is its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from echelon.schedule.action import ActionKind
from echelon.schedule.deadlock import send_window
from echelon.schedule.messages import (
    RECEIVES_AHEAD,
    SENDS_SPARE,
    Channel,
    ScheduleMessages,
)


class MessageCounts:
    """Count the messages that the ranks of a schedule hold."""

    def __init__(self, traffic: ScheduleMessages) -> None:
        """Take what the ranks of a schedule send."""
        self._traffic = traffic
        self._window = send_window(traffic) + SENDS_SPARE

    def of_rank(self, pp_rank: int) -> Iterator[int]:
        """Yield how many messages a rank holds beside each of its actions."""
        steps, receives = self._traffic.steps[pp_rank], self._traffic.receives[pp_rank]
        posted = arriving = local = 0
        leaving: Counter[Channel] = Counter()
        for position, step in enumerate(steps):
            while posted < len(steps) and posted <= position + RECEIVES_AHEAD:
                arriving += len(receives[posted])
                posted += 1
            if step.receive is not None:
                arriving -= 1
            elif step.local_input and step.action.kind is not ActionKind.W:
                local -= 1
            yield arriving + local + sum(leaving.values())
            if step.send is not None:
                channel = step.send.channel
                leaving[channel] = min(leaving[channel] + 1, self._window)
            elif step.local_output:
                local += 1
