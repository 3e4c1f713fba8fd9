"""Tokens travel twice, as recorded: to the expert that was chosen, and home again."""

from __future__ import annotations

from collections import Counter

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.page.lessons.expert_travel import (
    COMBINE,
    DISPATCH,
    ELEMENT_BYTES,
    TravelRecord,
    expert_travel,
)
from echelon.page.lessons.lesson import DiagramFigure, Frame
from echelon.page.lessons.traces import read_trace
from tests.page.lessons.reading import facts, figure, holds
from tests.page.lessons.recordings.experts import RANKS, TOP, record_travel


def record(name: str) -> TravelRecord:
    case = read_trace("experts")["cases"][name]
    return TravelRecord(case["hidden"], tuple(case["ranks"]))


def where(frame: Frame) -> dict[str, int]:
    """Return the rank on which each token is drawn."""
    places = figure(frame, DiagramFigure).places
    return {
        tile.id: rank
        for rank, place in enumerate(places)
        for tile in place.tiles
        if tile.id.startswith("token")
    }


@pytest.mark.system("S58")
def test_four_ranks_record_the_same_again(rank_pool: RankPool) -> None:
    assert record_travel(rank_pool) == read_trace("experts")


@pytest.mark.system("S58")
@pytest.mark.parametrize("name", TOP)
def test_a_token_goes_to_the_expert_that_its_router_chose_and_back(name: str) -> None:
    one = record(name)
    assert len(one.assignments) == 8 * TOP[name]
    # Whose expert is elsewhere travels there, once for each; the others stay.
    there = Counter(
        (token, source, target)
        for source, target, tokens, _ in one.messages(DISPATCH)
        for token in tokens
    )
    away = [(token, home, expert) for token, home, expert in one.assignments if home != expert]
    assert there == Counter(away)
    back = Counter(
        (token, target, source)
        for source, target, tokens, _ in one.messages(COMBINE)
        for token in tokens
    )
    assert back == there
    # What comes back says that it was at the expert of the rank that sends it.
    for rank, noted in enumerate(one.ranks):
        for message in noted["sent"]:
            visited = [] if message["name"] == DISPATCH else [rank] * len(message["tokens"])
            assert message["visited"] == visited
        wanted = sorted(token for token, _, expert in one.assignments if expert == rank)
        assert sorted(noted["arrived"]) == wanted


@pytest.mark.parametrize("name", TOP)
def test_what_is_drawn_is_what_was_recorded(name: str) -> None:
    one, frames = record(name), expert_travel().scene(top=name).frames
    assert len(frames) == 6
    packed, spread, routed, dispatched, computed, combined = frames
    assert len(figure(packed, DiagramFigure).places) == 1
    assert len(figure(spread, DiagramFigure).places) == RANKS
    home = {f"token {token}-{expert}": rank for token, rank, expert in one.assignments}
    at_experts = {f"token {token}-{expert}": expert for token, _, expert in one.assignments}
    assert where(routed) == where(combined) == home
    assert where(dispatched) == where(computed) == at_experts
    for frame, motion in ((dispatched, DISPATCH), (combined, COMBINE)):
        rows = sum(len(tokens) for _, _, tokens, _ in one.messages(motion))
        assert len(figure(frame, DiagramFigure).moves) == rows
        assert facts(frame)["rows that travel"] == f"{rows} of {len(one.assignments)}"
        assert facts(frame)["bytes sent, all ranks"] == str(rows * one.hidden * ELEMENT_BYTES)
    assert facts(computed)["tokens of each expert"] == ", ".join(map(str, one.loads))


def test_bytes_there_and_back_are_those_of_the_formula() -> None:
    # b s d k numbers are sent there and back, less what stays: doubled for 16 bits.
    assert holds("llm-training-51") == 2 * 4096 * 7168 * 8 * 2 * 7 / 8
    one = record("2 experts a token")
    frame = expert_travel().scene(top="2 experts a token").frames[3]
    even = 2 * 8 * one.hidden * 2 * ELEMENT_BYTES * (RANKS - 1) / RANKS
    assert facts(frame)["there and back, if experts were even"] == f"{even:g}"
