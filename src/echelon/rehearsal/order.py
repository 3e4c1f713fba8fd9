# SPDX-License-Identifier: Apache-2.0
"""Logs of ranks, and the proof that they fit together: equal operations, in an order that can run.

A log is what one rank gives its communicators in a step, and what it waits for, in the order of its
host. A collective of NCCL is a kernel on the stream of its communicator: it begins when the one
before it there has ended and the stream that computes has come to where it was issued, on every
member. A wait holds the stream that computes, not the host. The host itself waits in the first call
of a communicator, and of a pair of ranks that exchange messages, until all members have come; and
where it reads a number from the device.

An operation waits for the one before it on its communicator, and for the streams of all members to
come to where they issued it; a stream waits where its rank said so; a host waits in a first call,
and where it reads. It also waits with its stream: how far it may run ahead is the depth of a queue
of launches, and memory that has to be found for it. A circle of such waits is a deadlock, and
without one there is none: NCCL knows no tags, and holds nothing back. Members must call the same
kinds with as many bytes of one dtype, for the same data: parameters or gradients from one element
on, or the message of one microbatch, between the same stages (`identity.py`). Of other tensors the
name and the action are compared. All ranks of the run make all communicators in one order.

Ranks that differ in nothing but their place have equal logs, so one of each class is looked at. Two
operations are taken for one where the classes of their members are the same: a circle of ranks is
then a circle of classes, and where there is none of these there is none of those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TypeAlias

SEND, RECEIVE = "send", "receive"
_EXPERT = re.compile(r"experts\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePart:
    """One message of an exchange, as its sender or its receiver has it."""

    sender: int
    receiver: int
    is_sent: bool
    """Whether this rank sends it."""
    num_bytes: int
    data: str = ""
    """The data; "" if only the name of the exchange is known."""
    offset: int = 0
    """The first element of the data."""

    def __str__(self) -> str:
        """Return it as users read it."""
        data = f" of {self.data}, from element {self.offset:,}" if self.data else ""
        return f"{self.num_bytes:,} bytes{data}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The making of a communicator, in which every rank of the run takes part."""

    communicator: str
    members: tuple[int, int, int]
    """The first and the last rank, and a hash of all."""


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
    data: str = ""
    """The data, if known: a range of parameters, or a message."""
    offset: int = 0
    """The first element of the data."""
    parts: tuple[ExchangePart, ...] = ()
    """Messages of an exchange with other members."""
    opens: bool = False
    """Whether it is the first of its members, in which the host waits for all of them."""
    sent_bytes: int = field(default=0, compare=False)
    """Bytes that this rank sends for it over the links of its group, for its trace."""

    @property
    def data_of_class(self) -> str:
        """The data without numbers of experts, which differ between ranks of a class."""
        return _EXPERT.sub("experts", self.data)


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


Entry: TypeAlias = Issue | Wait | HostRead | Made


class RankLog:
    """Collect the entries of one rank."""

    def __init__(self, rank: int) -> None:
        """Begin without any."""
        self.rank = rank
        self.entries: list[Entry] = []
        self._opened: set[tuple[str, tuple[int, ...]]] = set()

    def made(self, communicator: str, ranks: Sequence[int]) -> None:
        """Write down that a communicator is made, of this rank or of others."""
        members = (ranks[0], ranks[-1], hash(tuple(ranks)))
        self.entries.append(Made(communicator=communicator, members=members))

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


MISMATCH, MISSING, DEADLOCK = "mismatch", "missing", "deadlock"
OTHER_DATA = "other-data"
"""Equal calls with different data."""

RankClass: TypeAlias = tuple[int, ...]
"""What tells ranks with unequal logs apart."""
Communication: TypeAlias = tuple[str, tuple[RankClass, ...]]
"""The name of a communicator, and the classes of its members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFault:
    """Hold what is wrong with the logs of the ranks: which rule it breaks, and where."""

    rule: str
    """MISMATCH, MISSING, DEADLOCK or OTHER_DATA."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProof:
    """Hold the outcome: faults, none where all is well, and how much was looked at."""

    faults: tuple[OrderFault, ...]
    num_operations: int
    num_classes: int


def prove_order(
    logs: Mapping[RankClass, Sequence[Entry]], class_of: Callable[[int], RankClass]
) -> OrderProof:
    """Return whether ranks with these logs, by class, match and can never wait in a circle."""
    graph = _WaitGraph(class_of)
    for one, entries in logs.items():
        graph.add(one, entries)
    faults = [*_made_otherwise(logs), *graph.unequal()]
    if not faults:
        faults += graph.circle()
    return OrderProof(
        faults=tuple(faults),
        num_operations=sum(map(len, graph.calls.values())),
        num_classes=len(logs),
    )


@dataclass(slots=True)
class _Call:
    """One operation of one class."""

    by: RankClass
    issue: Issue
    entry: int


@dataclass(slots=True)
class _WaitGraph:
    """Nodes that must come to pass, each after those that it waits for."""

    class_of: Callable[[int], RankClass]
    waits_for: list[list[int]] = field(default_factory=list[list[int]])
    meaning: dict[int, _Call] = field(default_factory=dict[int, _Call])
    """Of nodes that are where a rank stands, what it has just called or waits for."""
    calls: dict[tuple[Communication, RankClass], list[_Call]] = field(
        default_factory=dict[tuple[Communication, RankClass], list[_Call]]
    )
    operations: dict[tuple[Communication, int], int] = field(
        default_factory=dict[tuple[Communication, int], int]
    )
    openings: dict[Communication, int] = field(default_factory=dict[Communication, int])
    classes: dict[tuple[int, ...], tuple[RankClass, ...]] = field(
        default_factory=dict[tuple[int, ...], tuple[RankClass, ...]]
    )

    def _node(self, *waits_for: int) -> int:
        self.waits_for.append([one for one in waits_for if one >= 0])
        return len(self.waits_for) - 1

    def add(self, by: RankClass, entries: Sequence[Entry]) -> None:
        """Add what the ranks of a class do."""
        host = stream = self._node()
        issued: dict[int, int] = {}
        for place, entry in enumerate(entries):
            if isinstance(entry, Issue):
                call = _Call(by, entry, place)
                host, operation = self._issue(call, host, stream)
                issued[place] = operation
            elif isinstance(entry, Wait):
                host = stream = self._node(stream, host, issued[entry.issue])
                issue = entries[entry.issue]
                assert isinstance(issue, Issue)
                self.meaning[stream] = _Call(by, issue, place)
            elif isinstance(entry, HostRead):
                host = self._node(host, stream)

    def _classes(self, members: tuple[int, ...]) -> tuple[RankClass, ...]:
        """Return the classes of ranks, in order; of each group they are looked up once."""
        if members not in self.classes:
            self.classes[members] = tuple(sorted({self.class_of(rank) for rank in members}))
        return self.classes[members]

    def _issue(self, call: _Call, host: int, stream: int) -> tuple[int, int]:
        """Add an operation; return where the host stands after it, and the operation's node."""
        issue = call.issue
        among = (issue.communicator, self._classes(issue.members))
        known = self.calls.setdefault((among, call.by), [])
        key = (among, len(known))
        known.append(call)
        if issue.opens:
            if among not in self.openings:
                self.openings[among] = self._node()
            arrived = self._node(host)
            self.waits_for[self.openings[among]].append(arrived)
            host = self._node(arrived, self.openings[among])
            self.meaning[host] = call
        if key not in self.operations:
            before = self.operations.get((among, key[1] - 1), -1)
            self.operations[key] = self._node(before)
        operation = self.operations[key]
        began = self._node(host, stream)
        self.meaning[began] = call
        self.waits_for[operation].append(began)
        return host, operation

    def unequal(self) -> Iterator[OrderFault]:
        """Yield where members of a communicator do not call the same."""
        by_communication: dict[Communication, dict[RankClass, list[_Call]]] = {}
        for (among, by), calls in self.calls.items():
            by_communication.setdefault(among, {})[by] = calls
        for (name, classes), found in by_communication.items():
            first = max(found.values(), key=len)
            members = {rank for calls in found.values() for rank in calls[0].issue.members}
            alone = all(self.class_of(rank) == (rank,) for rank in members)
            faults = (
                _difference(name, first, found.get(member, []), member, offsets=alone)
                for member in classes
            )
            fault = next((fault for fault in faults if fault is not None), None)
            if fault is None and alone:
                fault = next(_unequal_parts(name, found), None)
            if fault is not None:
                yield fault

    def circle(self) -> Iterator[OrderFault]:
        """Yield a circle of waits, where there is one."""
        left = [len(before) for before in self.waits_for]
        after: list[list[int]] = [[] for _ in self.waits_for]
        for node, before in enumerate(self.waits_for):
            for one in before:
                after[one].append(node)
        ready = [node for node, count in enumerate(left) if count == 0]
        while ready:
            for one in after[ready.pop()]:
                left[one] -= 1
                if left[one] == 0:
                    ready.append(one)
        stuck = next((node for node, count in enumerate(left) if count > 0), None)
        if stuck is None:
            return
        path: list[int] = []
        place: dict[int, int] = {}
        while stuck not in place:
            place[stuck] = len(path)
            path.append(stuck)
            stuck = next(one for one in self.waits_for[stuck] if left[one] > 0)
        told = [self.meaning[one] for one in path[place[stuck] :] if one in self.meaning]
        yield OrderFault(rule=DEADLOCK, text="; ".join(_standing(one) for one in told))


def _standing(call: _Call) -> str:
    issue = call.issue
    at = f" at {issue.task}" if issue.task else ""
    first = "the first call, " if issue.opens else ""
    call_name = f"{first}{issue.kind} {issue.name} of {issue.communicator}"
    return f"ranks like {call.by} wait at {call_name}{at}"


def _difference(
    name: str, first: Sequence[_Call], calls: Sequence[_Call], by: RankClass, *, offsets: bool
) -> OrderFault | None:
    """Return the first call in which a class differs from another member.

    `offsets`: classes are single ranks, whose data begins at the same element.
    """
    for number, (one, other) in enumerate(zip(first, calls, strict=False)):
        a, b = one.issue, other.issue
        kinds = {a.kind, b.kind}
        fits = kinds == {SEND, RECEIVE} if kinds & {SEND, RECEIVE} else a.kind == b.kind
        if one is other:
            continue
        if not fits or (a.num_bytes, a.dtype) != (b.num_bytes, b.dtype):
            return OrderFault(
                rule=MISMATCH,
                text=f"call {number} on {name}: {_words(a)} by ranks like {one.by}, {_words(b)} by "
                f"ranks like {other.by}",
            )
        if _has_other_data(a, b, offsets=offsets):
            return OrderFault(
                rule=OTHER_DATA,
                text=f"call {number} on {name}: {_data(a)} by ranks like {one.by}, {_data(b)} by "
                f"ranks like {other.by}",
            )
    if len(calls) < len(first):
        a = first[len(calls)]
        return OrderFault(
            rule=MISSING,
            text=f"call {len(calls)} on {name}: {_words(a.issue)} by ranks like {a.by}, and nothing"
            f" by ranks like {by}",
        )
    return None


def _has_other_data(call: Issue, other: Issue, *, offsets: bool) -> bool:
    if call.data and other.data and offsets:
        return (call.data, call.offset) != (other.data, other.offset)
    if call.data and other.data:
        return call.data_of_class != other.data_of_class
    # A parameter server has no actions.
    both_act = not call.data and not other.data and call.task and other.task
    return call.name != other.name or bool(both_act and call.task != other.task)


def _data(issue: Issue) -> str:
    if issue.data:
        return f"{issue.kind} {issue.name} with {issue.data}, from element {issue.offset:,}"
    return f"{issue.kind} {issue.name}" + (f" in {issue.task}" if issue.task else "")


def _made_otherwise(logs: Mapping[RankClass, Sequence[Entry]]) -> Iterator[OrderFault]:
    """Yield the first communicator that ranks make in different orders: both would wait."""
    made = {by: [entry for entry in log if isinstance(entry, Made)] for by, log in logs.items()}
    if not made:
        return
    (first, expected), *rest = made.items()
    for by, others in rest:
        for number, pair in enumerate(zip_longest(expected, others)):
            if pair[0] != pair[1]:
                a, b = (
                    "none" if m is None else f"{m.communicator} from rank {m.members[0]} on"
                    for m in pair
                )
                yield OrderFault(
                    rule=MISMATCH,
                    text=f"communicator {number} that ranks make: {a} by ranks like {first}, {b} "
                    f"by ranks like {by}",
                )
                return


def _unequal_parts(name: str, calls: Mapping[RankClass, Sequence[_Call]]) -> Iterator[OrderFault]:
    """Yield messages of an exchange whose ends have different sizes or data."""
    for number, members in enumerate(zip(*calls.values(), strict=True)):
        parts: dict[tuple[int, int], dict[bool, ExchangePart]] = {}
        for part in (part for call in members for part in call.issue.parts):
            parts.setdefault((part.sender, part.receiver), {})[part.is_sent] = part
        for (sender, receiver), ends in parts.items():
            sent, received = ends.get(True), ends.get(False)
            same_size = False
            if sent is not None and received is not None:
                same_size = sent.num_bytes == received.num_bytes
                same_place = (sent.data, sent.offset) == (received.data, received.offset)
                if same_size and (same_place or not sent.data or not received.data):
                    continue
            yield OrderFault(
                rule=OTHER_DATA if same_size else MISMATCH,
                text=f"call {number} on {name}, {members[0].issue.name}: rank {sender} sends "
                f"{sent or 'nothing'} to rank {receiver}, which receives {received or 'nothing'}",
            )


def _words(issue: Issue) -> str:
    return f"{issue.kind} {issue.name} of {issue.num_bytes:,} bytes of {issue.dtype}"
