# SPDX-License-Identifier: Apache-2.0
"""Collectives as ranks recorded them: their messages, and what each had after each round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.page.lessons.traces import read_trace

ALL_TO_ALL = "all-to-all"
State = tuple[Mapping[int, int], ...]
"""What each rank has: its numbers by their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMessage:
    """Hold a message: its numbers are added to those from place `start` on, or replace them."""

    round: int
    source: int
    target: int
    start: int
    values: tuple[int, ...]
    adds: bool

    @property
    def places(self) -> range:
        """Return the places of its numbers."""
        return range(self.start, self.start + len(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCollective:
    """Hold one collective: what ranks gave and got, their messages, the bytes each sent."""

    name: str
    given: tuple[tuple[int, ...], ...]
    got: tuple[tuple[int, ...], ...]
    messages: tuple[RecordedMessage, ...]
    bytes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Return how many ranks took part."""
        return len(self.given)

    @property
    def num_rounds(self) -> int:
        """Return in how many rounds, one after the other, all messages were sent."""
        return 1 + max(message.round for message in self.messages)

    def round(self, number: int) -> tuple[RecordedMessage, ...]:
        """Return the messages of one round."""
        return tuple(one for one in self.messages if one.round == number)

    def states(self) -> tuple[State, ...]:
        """Return what ranks had at first and after each round; not of an all-to-all.

        A rank that gave one number has it at its own place.
        """
        now = [
            {(place if len(numbers) > 1 else rank): one for place, one in enumerate(numbers)}
            for rank, numbers in enumerate(self.given)
        ]
        found: list[State] = [tuple(dict(one) for one in now)]
        for number in range(self.num_rounds):
            for one in self.round(number):
                for place, value in zip(one.places, one.values, strict=True):
                    there = now[one.target].get(place, 0) if one.adds else 0
                    now[one.target][place] = there + value
            found.append(tuple(dict(one) for one in now))
        return tuple(found)


def recorded_collective(name: str) -> RecordedCollective:
    """Return a collective, or an algorithm of an all-reduce, by its name, such as ``tree``."""
    found = read_trace("collectives")[name]
    return RecordedCollective(
        name=name,
        given=tuple(map(tuple, found["given"])),
        got=tuple(map(tuple, found["got"])),
        bytes=tuple(found["bytes"]),
        messages=tuple(
            RecordedMessage(
                round=one["round"],
                source=one["from"],
                target=one["to"],
                start=one["start"],
                values=tuple(one["values"]),
                adds=one["adds"],
            )
            for one in found["messages"]
        ),
    )
