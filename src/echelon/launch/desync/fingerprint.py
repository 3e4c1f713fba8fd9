# SPDX-License-Identifier: Apache-2.0
"""What is known of the operations of ranks: fingerprints, and what each rank does now. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from echelon.launch.desync.connections import Connections

SEND, RECEIVE = "send", "receive"

Content = tuple[str, str, tuple[int, ...], str]
"""What members of a group must call alike: kind, name, shape, dtype."""
Channel = tuple[str, tuple[int, ...], tuple[int, int] | None]
"""Where sequence numbers count: a group, or one direction between two ranks of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Hold what a rank wrote down when it began a collective or a message."""

    number: int
    """Which operation of its rank it is, counted from 1."""
    group: str
    """What every member calls the communicator."""
    axis: str
    """The axis of the mesh that it was called over."""
    ranks: tuple[int, ...]
    """The members, global and in order."""
    sequence: int
    """Which operation it is in its channel, counted from 1."""
    kind: str
    """The name of a collective, or `send` or `receive`."""
    name: str
    """What it is for."""
    shape: tuple[int, ...] = ()
    """Of the tensor that must be alike on all members; () where sizes may differ."""
    dtype: str = ""
    """The dtype of the elements; "" where sizes may differ."""
    ends: tuple[int, int] | None = None
    """The ranks that a message leaves and reaches; None of a collective."""
    site: str = ""
    """The line that called it: file, line, function."""
    task: str = ""
    """What the rank was at: an action of its schedule."""
    ended: bool = False
    """Whether the rank has seen its end."""
    issued_at: float = 0.0
    """Seconds on the monotonic clock of its host."""

    @property
    def channel(self) -> Channel:
        """Return where its sequence number counts."""
        return (self.group, self.ranks, self.ends)

    @property
    def content(self) -> Content:
        """Return what must be alike on all members; a send and its receive are alike."""
        kind = "message" if self.ends is not None else self.kind
        return (kind, self.name, self.shape, self.dtype)

    @property
    def place_in_program(self) -> tuple[str, str, Content]:
        """Return what ranks with the same program do alike, whatever their place in the mesh."""
        return (self.group, self.kind, self.content)


class Activity(StrEnum):
    """Say what a rank does now."""

    WAITS = "waits"
    RUNS = "runs"
    RETURNED = "returned"
    RAISED = "raised"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """Hold what is known of one rank at one time."""

    rank: int
    """The rank."""
    label: str = ""
    """Its place in the mesh."""
    activity: Activity = Activity.RUNS
    """What it does now."""
    fingerprints: tuple[Fingerprint, ...] = ()
    """The last operations that it began, oldest first."""
    waits_for: int | None = None
    """The number of the operation that it waits in; None where it is none of these."""
    waited_s: float = 0.0
    """Seconds for which it has waited."""
    awaits: int | None = None
    """The member whose message it waits for, where that is known."""
    counts_until: int | None = None
    """The number of its first unfinished operation, where a device runs them behind the host."""
    doing: str = ""
    """What it was last at: a step, a checkpoint."""
    call: str = ""
    """What it waits in outside of all fingerprints: a call of torch.distributed."""
    place: str = ""
    """The line that it is at, outside of a wait."""
    stack: str = ""
    """The stack of its threads."""
    host: str = ""
    """The host that it runs on, where ranks run on several."""
    connections: Connections | None = None
    """What its TCP connections say; None where that is not known."""

    @property
    def waiting(self) -> Fingerprint | None:
        """Return the operation that it waits in."""
        if self.activity is not Activity.WAITS or self.waits_for is None:
            return None
        return next((one for one in self.fingerprints if one.number == self.waits_for), None)

    @property
    def last(self) -> Fingerprint | None:
        """Return the last operation that it began."""
        return self.fingerprints[-1] if self.fingerprints else None

    def has_called(self, other: Fingerprint) -> bool:
        """Return whether the rank has begun its part of `other`, and its device has come there."""
        return any(
            one.channel == other.channel
            and one.sequence >= other.sequence
            and (self.counts_until is None or one.number <= self.counts_until)
            for one in self.fingerprints
        )


def partners(one: Fingerprint) -> Sequence[int]:
    """Return the ranks that must take part in an operation."""
    return one.ranks if one.ends is None else one.ends
