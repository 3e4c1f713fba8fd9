# SPDX-License-Identifier: Apache-2.0
"""Collectives as ranks recorded them: messages of each round, and what ranks have after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.page.lessons.lesson import DiagramFigure, Move, Place, Tile, TileState
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


def round_board(
    run: RecordedCollective, number: int, state: State, nodes: Sequence[int] = ()
) -> DiagramFigure:
    """Return what ranks have after `number` rounds, with the messages of the last one.

    Ranks stand in the boxes of their `nodes`, where these matter.
    """
    messages = run.round(number - 1)
    came = {(one.target, place): one.source for one in messages for place in one.places}
    total = totals(run)
    return DiagramFigure(
        kinds=tuple(f"place {place}" for place in range(run.num_ranks)),
        places=tuple(
            Place(
                label=f"rank {rank}",
                note="",
                tiles=tuple(
                    _tile(rank, place, numbers[place], total, came.get((rank, place)))
                    for place in sorted(numbers)
                ),
                group=f"node {nodes[rank]}" if nodes else "",
            )
            for rank, numbers in enumerate(state)
        ),
        moves=tuple(
            message_move(one, f"{one.source}.{one.start}", f"{one.target}.{one.start}")
            for one in messages
        ),
    )


def message_move(one: RecordedMessage, source: str, target: str) -> Move:
    """Return the arrow of a message between two tiles."""
    does = "added to" if one.adds else "kept in"
    numbers = ", ".join(map(str, one.values))
    places = ", ".join(map(str, one.places))
    where = f"{does} place{'s' * (len(one.values) > 1)} {places}"
    words = f"rank {one.source} sends {numbers} to rank {one.target}, {where}"
    return Move(source=source, target=target, words=words)


def totals(run: RecordedCollective) -> dict[int, int]:
    """Return what a place has when it is complete: a sum, or the piece itself."""
    if run.name == "all-gather":
        return {rank: numbers[0] for rank, numbers in enumerate(run.given)}
    return {place: sum(column) for place, column in enumerate(zip(*run.given, strict=True))}


def _tile(rank: int, place: int, value: int, total: dict[int, int], source: int | None) -> Tile:
    complete = value == total[place]
    state: TileState = "whole" if complete else "part"
    return Tile(
        id=f"{rank}.{place}",
        label=str(value),
        words=f"place {place}, {'complete' if complete else 'a part of the sum'}",
        kind=place,
        state=state,
        row=place,
        origin="" if source is None else f"{source}.{place}",
    )
