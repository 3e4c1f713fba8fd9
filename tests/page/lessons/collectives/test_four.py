"""Four collectives: what is drawn in each round is what ranks recorded."""

from __future__ import annotations

import pytest

from echelon.core.units import decimal_bytes
from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.collectives import (
    ALL_TO_ALL,
    NAMES,
    bytes_by_formula,
    four_collectives,
    recorded_collective,
)
from tests.page.lessons.shown import diagrams, facts, tiles


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.system("S58")
def test_a_round_shows_its_messages_and_what_came_of_them(name: str) -> None:
    run, frames = recorded_collective(name), four_collectives().scene(collective=name).frames
    assert len(frames) == run.num_rounds + 1
    for number, frame in enumerate(frames[1:]):
        (board,) = diagrams(frame)
        told = [one.words for one in board.moves]
        for one, words in zip(run.round(number), told, strict=True):
            assert words.startswith(
                f"rank {one.source} sends {one.values[0]} to rank {one.target}, "
            )
    last = tiles(frames[-1])
    for rank, numbers in enumerate(run.got):
        for place, value in enumerate(numbers):
            drawn = {
                ALL_TO_ALL: f"{place}>{rank}",
                "reduce-scatter": f"{rank}.{rank}",
            }.get(name, f"{rank}.{place}")
            assert last[drawn].label == str(value)
            assert last[drawn].state == "whole"


@pytest.mark.parametrize("name", NAMES)
def test_bytes_grow_to_those_of_the_formula(name: str) -> None:
    frames = four_collectives().scene(collective=name).frames
    told = [facts(one)["rank 0 has sent"] for one in frames]
    assert told[0] == "0 B"
    assert told[-1] == decimal_bytes(bytes_by_formula(name))
    assert facts(frames[-1])["messages so far"].split(" of ")[0] == str(
        len(recorded_collective(name).messages)
    )


def test_shares_at_eight_ranks_are_those_of_the_guide() -> None:
    (claim,) = (one for one in all_claims() if one.id == "llm-training-64")
    order = ("all-reduce", "all-gather", "reduce-scatter", ALL_TO_ALL)
    assert [bytes_by_formula(name, 8) / (8 * 4) for name in order] == claim.holds


def test_ring_phases_turn_after_as_many_rounds_as_there_are_others() -> None:
    run = recorded_collective("all-reduce")
    assert [run.round(number)[0].adds for number in range(6)] == [True] * 3 + [False] * 3
    frame = four_collectives().scene(collective="all-reduce").frames[3]
    assert "the reduce-scatter is over" in frame.caption
    complete = [tile for tile in tiles(frame).values() if tile.state == "whole"]
    assert len(complete) == 4
