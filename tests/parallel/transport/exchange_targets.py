"""What ranks run in the tests of exchanges."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.event import Event
from echelon.launch.context import RankContext
from echelon.parallel.transport.collectives import Pending
from tests.parallel.targets import tensor_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What one rank received from each other, in each round, and what it recorded."""

    received: list[dict[int, torch.Tensor]]
    events: list[Event]
    refusal: str


def length(source: int, target: int) -> int:
    """Return how many numbers a rank sends another one: none to the one before it."""
    return 0 if target + 1 == source else 10 * source + target + 1


def message(source: int, target: int, round_: int) -> torch.Tensor:
    """Return what a rank sends another one."""
    return torch.arange(length(source, target)) + 1000 * (100 * round_ + 10 * source + target)


def exchange(context: RankContext, rounds: int) -> Exchanged:
    """Start several exchanges at once; end them in the opposite order."""
    group, events = tensor_group(context)
    me = group.index
    received: list[dict[int, torch.Tensor]] = []
    under_way: list[Pending] = []
    for round_ in range(rounds):
        # In the second round one rank alone sends and one alone receives.
        pairs = [
            (source, target)
            for source in range(group.size)
            for target in range(group.size)
            if source != target and length(source, target)
            if round_ != 1 or (source, target) == (0, 1)
        ]
        sends = {b: message(a, b, round_) for a, b in pairs if a == me}
        empty = torch.empty(0, dtype=torch.int64)
        receives = {a: empty.new_full((length(a, b),), -1) for a, b in pairs if b == me}
        under_way.append(group.exchange(sends, receives, name=f"round {round_}"))
        received.append(receives)
    for pending in under_way[::-1]:
        pending.wait()
    strided = {(me + 1) % group.size: torch.zeros(4, 2).t()[0]}
    try:
        group.exchange(strided, {}, name="strided")
    except ValueError as error:
        return Exchanged(received=received, events=events.events, refusal=str(error))
    raise AssertionError("a strided tensor was sent")
