"""A board shows what ranks have, where it came from, and which sums are complete."""

from __future__ import annotations

from echelon.page.lessons.collectives import (
    RecordedCollective,
    RecordedMessage,
    message_move,
    round_board,
    totals,
)

PAIR = RecordedCollective(
    name="pair",
    given=((1, 2), (10, 20)),
    got=((11, 22), (11, 22)),
    messages=(
        RecordedMessage(round=0, source=0, target=1, start=0, values=(1, 2), adds=True),
        RecordedMessage(round=1, source=1, target=0, start=0, values=(11, 22), adds=False),
    ),
    bytes=(8, 8),
)


def test_tiles_are_parts_until_the_sum_is_complete() -> None:
    boards = [round_board(PAIR, number, state) for number, state in enumerate(PAIR.states())]
    labels = [[tile.label for place in one.places for tile in place.tiles] for one in boards]
    assert labels == [
        ["1", "2", "10", "20"],
        ["1", "2", "11", "22"],
        ["11", "22", "11", "22"],
    ]
    states = [{tile.state for place in one.places for tile in place.tiles} for one in boards]
    assert states == [{"part"}, {"part", "whole"}, {"whole"}]
    assert totals(PAIR) == {0: 11, 1: 22}


def test_what_came_has_its_origin_and_an_arrow() -> None:
    board = round_board(PAIR, 1, PAIR.states()[1], nodes=(0, 1))
    tiles = {tile.id: tile for place in board.places for tile in place.tiles}
    assert tiles["1.1"].origin == "0.1"
    assert tiles["0.1"].origin == ""
    (move,) = board.moves
    assert (move.source, move.target) == ("0.0", "1.0")
    assert move.words == "rank 0 sends 1, 2 to rank 1, added to places 0, 1"
    assert [place.group for place in board.places] == ["node 0", "node 1"]
    kept = message_move(PAIR.messages[1], "a", "b")
    assert kept.words.endswith("kept in places 0, 1")
