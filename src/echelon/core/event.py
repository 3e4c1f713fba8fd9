# SPDX-License-Identifier: Apache-2.0
"""One event of a run, planned or measured: the simulator, the rehearsal and the run write the same.

So one renderer draws all of them and one function compares any two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Protocol

ATTEND = "attend"
MULTIPLY = "multiply"
APPLY = "apply"
"""The kind of a gradient that a server applied; `core/choices/updates.py` has its name."""
LOST, THERE = "lost", "there"
"""The kinds in which an island says that another one is lost, or there (again)."""
MEET = "meet"
"""The kind in which an island that may be lost says which islands met."""

BESIDE_MESSAGES = frozenset({ATTEND, MULTIPLY})
"""The kinds of work inside of an action that messages hide behind, step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Record one thing that a rank did."""

    kind: str
    """A collective (`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`,
    `send`), a pipeline action (`F`, `B`, `W`, `BW`), the attention to one block of keys inside of
    one (`attend`, of context ranks), the product of one chunk of rows (`multiply`, of tensor ranks
    that overlap), what a rank does before and after them in a step (`load` the batch, `update` the
    parameters), or that a parameter server did with a worker's gradient (`apply`) or learned of a
    worker (`lost`, `there`), or that islands met (`meet`)."""
    name: str
    """What it was done to: a bucket, a unit, a tensor."""
    axis: str = ""
    """The axis of the mesh whose group took part; "" where nothing was sent."""
    stage: int | None = None
    """The pipeline stage; None where it belongs to none."""
    microbatch: int | None = None
    """The microbatch of the step; None where it belongs to none."""
    bytes: int = 0
    """Bytes that this rank sends over the links of its group (`cost/bytes/terms.py`), not the
    payload."""
    start: float = 0.0
    """Seconds on the rank's own clock since the run began."""
    end: float = 0.0
    """Seconds on the rank's own clock since the run began."""
    rank: int = 0
    """The rank that did it."""
    waited_s: float = 0.0
    """Seconds for which the rank had nothing to do but wait: for the result of this collective, or
    for this send to leave, within the event; for the message that an action needs, before it."""

    def to_json(self) -> dict[str, object]:
        """Return the event as a JSON object."""
        return asdict(self)


class EventSink(Protocol):
    """Anything that takes events."""

    def record(self, event: Event) -> None:
        """Take one event."""
        ...


@dataclass(slots=True)
class EventList:
    """Keep events in memory, in the order in which they came."""

    events: list[Event] = field(default_factory=list[Event])

    def record(self, event: Event) -> None:
        """Append one event."""
        self.events.append(event)

    def bytes_by_axis(self) -> dict[str, int]:
        """Return the bytes sent per axis."""
        total: dict[str, int] = {}
        for event in self.events:
            if event.axis:
                total[event.axis] = total.get(event.axis, 0) + event.bytes
        return total


class NoEvents:
    """Take events and keep none."""

    def record(self, event: Event) -> None:
        """Drop one event."""
