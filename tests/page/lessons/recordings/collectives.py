"""Four collectives on four ranks, message by message: what each member sent, and what it got."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from echelon.core.event import EventList
from echelon.cost.bytes.all_reduce import SumGroup
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport.algorithms import (
    Step,
    gather_steps_of,
    scatter_steps_of,
    steps_of,
)
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.messages import GlooPeers
from tests.parallel.targets import tensor_group

RANKS = 4
OTHERS = ("halving-doubling", "tree", "hierarchical")
"""Algorithms of an all-reduce beside the ring."""
Values = list[int]


@dataclass(slots=True)
class Log:
    """Keep the messages of one rank, each with the round in which it was posted."""

    messages: list[tuple[int, int, Values]] = field(default_factory=list)
    round: int = 0
    waited: bool = False

    def sent(self, place: int, tensor: torch.Tensor) -> None:
        """Note a message to `place`; what is posted after a wait is of the next round."""
        self.posted()
        self.messages.append((self.round, place, [int(x) for x in tensor.tolist()]))

    def posted(self) -> None:
        """Begin the next round where the last one has been waited for."""
        if self.waited:
            self.round, self.waited = self.round + 1, False


@dataclass(frozen=True, slots=True)
class Waited:
    """A message under way; its wait is noted."""

    work: Any
    log: Log

    def wait(self) -> None:
        """Return when it is over."""
        self.work.wait()
        self.log.waited = True

    def is_completed(self) -> bool:
        """Return whether it is known to be over."""
        return self.work.is_completed()


@contextmanager
def logged_messages(log: Log) -> Iterator[None]:
    """Note every message that this rank sends to another of its group."""
    send, receive = GlooPeers.send, GlooPeers.receive

    def logged_send(peers: GlooPeers, tensor: torch.Tensor, member: int) -> Waited:
        log.sent(member, tensor)
        return Waited(send(peers, tensor, member), log)

    def logged_receive(peers: GlooPeers, tensor: torch.Tensor, member: int) -> Waited:
        log.posted()
        return Waited(receive(peers, tensor, member), log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooPeers, "send", logged_send)
        patch.setattr(GlooPeers, "receive", logged_receive)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one rank gave, got, sent and was recorded to have sent, in one collective."""

    given: Values
    got: Values
    messages: list[tuple[int, int, Values]]
    steps: tuple[Step, ...]
    bytes: int


def run_collectives(context: RankContext, _: None) -> dict[str, Ran]:
    """Run each collective once, on numbers that tell by their digits whose they are."""
    group, events = tensor_group(context)
    rank, n = group.index, group.size
    sums = sums_of("ring", rank)
    group.sum_by(sums)
    own = torch.tensor([(chunk + 1) * 10**rank for chunk in range(n)], dtype=torch.float32)
    found: dict[str, Ran] = {}

    def ran(name: str, given: torch.Tensor, steps: tuple[Step, ...], call: Any) -> None:
        log = Log()
        events.events.clear()
        with logged_messages(log):
            got = call(given.clone())
        found[name] = Ran(
            given=_plain(given),
            got=_plain(got),
            messages=log.messages,
            steps=steps,
            bytes=_sent(events),
        )

    ran("all-reduce", own, steps_of(sums, n), lambda x: _all_reduce(group, x))
    ran("reduce-scatter", own, scatter_steps_of(sums, n), lambda x: _reduce_scatter(group, x))
    ran("all-gather", own[:1], gather_steps_of(sums, n), lambda x: _all_gather(group, x))
    blocks = torch.tensor([10 * rank + other for other in range(n)], dtype=torch.float32)
    ran("all-to-all", blocks, (), lambda x: _all_to_all(group, x))
    for algorithm in OTHERS:
        other = sums_of(algorithm, rank)
        group.sum_by(other)
        ran(algorithm, own, steps_of(other, n), lambda x: _all_reduce(group, x))
    return found


def sums_of(algorithm: str, rank: int) -> SumGroup:
    """Return a member of the group: all on one node, or two on each where nodes matter."""
    each = 2 if algorithm == "hierarchical" else RANKS
    nodes = tuple(one // each for one in range(RANKS))
    return SumGroup(algorithm=algorithm, place=rank, nodes=nodes)


def _plain(tensor: torch.Tensor) -> Values:
    return [int(x) for x in tensor.tolist()]


def _sent(events: EventList) -> int:
    return sum(event.bytes for event in events.events)


def _all_reduce(group: Group, x: torch.Tensor) -> torch.Tensor:
    group.all_reduce(x, name="sum").wait()
    return x


def _reduce_scatter(group: Group, x: torch.Tensor) -> torch.Tensor:
    own = x.new_empty(len(x) // group.size)
    group.reduce_scatter(own, x, name="scatter").wait()
    return own


def _all_gather(group: Group, x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(len(x) * group.size)
    group.all_gather(whole, x, name="gather").wait()
    return whole


def _all_to_all(group: Group, x: torch.Tensor) -> torch.Tensor:
    got = x.clone()
    others = [place for place in range(group.size) if place != group.index]
    sends = {place: x[place : place + 1] for place in others}
    receives = {place: got[place : place + 1] for place in others}
    group.exchange(sends, receives, name="exchange").wait()
    return got


def record_collectives(pool: RankPool) -> dict[str, Any]:
    """Return the collectives of four ranks as plain values; a message is told by its sender."""
    ranks: list[dict[str, Ran]] = pool.run(
        f"{__name__}:{run_collectives.__name__}", None, world_size=RANKS
    )
    return {
        name: {
            "given": [one[name].given for one in ranks],
            "got": [one[name].got for one in ranks],
            "bytes": [one[name].bytes for one in ranks],
            "messages": _messages([one[name] for one in ranks]),
        }
        for name in ranks[0]
    }


def _messages(ranks: list[Ran]) -> list[dict[str, Any]]:
    """Return what ranks sent: in which round, to whom, the place of its first number, numbers.

    Where an algorithm has steps, the place is that of the step in which the other receives it, and
    so is whether it is added.
    """
    landing = {
        (source, rank): deque(
            (part.start, step.adds)
            for step in one.steps
            for place, part in step.receives
            if place == source
        )
        for rank, one in enumerate(ranks)
        for source in range(RANKS)
    }
    found: list[dict[str, Any]] = []
    for rank, one in enumerate(ranks):
        for round, to, values in one.messages:
            there = landing[rank, to]
            start, adds = there.popleft() if there else (to, False)
            where = {"round": round, "from": rank, "to": to, "start": start, "adds": adds}
            found.append({**where, "values": values})
    assert not any(landing.values()), "what was sent was received"
    return found
