# SPDX-License-Identifier: Apache-2.0
"""What one rank gives its communicators in a step, and what it waits for, in the order of its host.

A collective of NCCL is a kernel on the stream of its communicator: it begins when the one before it
there has ended and the stream that computes has come to where it was issued, on every member. A
wait holds the stream that computes, not the host. The host itself waits in the first call of a
communicator, and of a pair of ranks that exchange messages, until all members have come; and where
it reads a number from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

SEND, RECEIVE = "send", "receive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """Say that a rank gives an operation to a communicator."""

    communicator: str
    """What this rank calls it: no two of its communicators have the same name."""
    members: tuple[int, ...]
    """The ranks that must come, in order; of a message its two ends, the lower first."""
    kind: str
    """What it does: the name of a collective, or `send` or `receive`."""
    num_bytes: int
    """Bytes that must be the same on all members; 0 of an exchange of any sizes."""
    dtype: str
    """The dtype of the elements; "" of an exchange of any sizes."""
    name: str
    """What it is for."""
    task: str = ""
    """What the rank was at: an action of its schedule."""
    opens: bool = False
    """Whether it is the first of its members, in which the host waits for all of them."""
    sent_bytes: int = field(default=0, compare=False)
    """Bytes that this rank sends for it over the links of its group, for its trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Say that the stream that computes waits for the operation that stands at `issue`."""

    issue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRead:
    """Say that the host waits for a number of the device."""

    operation: str
    """What asked for it."""
    where: str
    """The place in the code."""
    task: str = ""
    """What the rank was at."""
    what: str = ""
    """What is read, where the engine says that it reads."""


Entry: TypeAlias = Issue | Wait | HostRead


class RankLog:
    """Collect the entries of one rank."""

    def __init__(self, rank: int) -> None:
        """Begin without any."""
        self.rank = rank
        self.entries: list[Entry] = []
        self._opened: set[tuple[str, tuple[int, ...]]] = set()

    def issue(self, one: Issue) -> int:
        """Write down an operation and return its place; the first of its members opens them."""
        key = (one.communicator, one.members)
        self.entries.append(replace(one, opens=key not in self._opened))
        self._opened.add(key)
        return len(self.entries) - 1

    def wait(self, issue: int) -> None:
        """Write down a wait for the operation at a place."""
        self.entries.append(Wait(issue=issue))

    def host_read(self, operation: str, where: str, task: str = "", what: str = "") -> None:
        """Write down that the host reads from the device."""
        self.entries.append(HostRead(operation=operation, where=where, task=task, what=what))
