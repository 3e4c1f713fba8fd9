# SPDX-License-Identifier: Apache-2.0
"""What ranks have after a round of messages, as tiles: one for each place of each rank."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.page.lessons.collectives.recorded import (
    RecordedCollective,
    RecordedMessage,
    State,
)
from echelon.page.lessons.diagram import DiagramFigure, Move, Place, Tile, TileState


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
