"""A neighbour is one change, and two plans are told apart choice by choice."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from echelon.planner.explain.neighbours import Neighbour, explain_neighbours
from echelon.planner.explain.plan_changes import candidate_differences, neighbouring_changes
from echelon.planner.search.search import SearchResult, search
from tests.planner.requests import MIXTURE, small


@lru_cache(maxsize=1)
def _answer() -> SearchResult:
    return search(replace(small(memory_gb=4.0), top=1))


def test_differences_name_both_sides() -> None:
    answer = _answer()
    assert answer.best is not None
    choice = answer.best.candidate
    other = replace(choice, zero=3, microbatch=2 * choice.microbatch)
    found = {name: (old, new) for name, old, new in candidate_differences(choice, other)}
    assert found == {
        "ZeRO": (str(choice.zero), "3"),
        "microbatch": (str(choice.microbatch), str(2 * choice.microbatch)),
    }
    assert candidate_differences(choice, choice) == ()


@lru_cache(maxsize=1)
def _told() -> tuple[SearchResult, tuple[Neighbour, ...]]:
    answer = search(replace(small(memory_gb=4.0, pins=["cp=1"]), top=1))
    return answer, explain_neighbours(answer)


def test_one_change_is_one_change() -> None:
    answer, _ = _told()
    assert answer.best is not None
    choice = answer.best.candidate
    names: list[str] = []
    for move in neighbouring_changes(answer.request, choice):
        names.append(move.name)
        assert move.candidate is None or move.candidate != choice
        assert move.candidate is None or move.candidate.devices == choice.devices
    assert len(names) == len(set(names)) >= 7
    assert any(name.startswith("tp ") for name in names)
    assert any(name.startswith("ZeRO ") for name in names)


def test_pins_leave_out_what_they_exclude() -> None:
    request = small(pins=["tp=2", "zero=1", "cp=1"])
    answer = search(replace(request, top=1))
    assert answer.best is not None
    moves = [*neighbouring_changes(request, answer.best.candidate)]
    assert moves
    assert not any({*move.pins} & {"zero", "cp"} for move in moves)
    assert all(move.pins.get("tp", 2) == 2 for move in moves)


def test_experts_are_asked_about_where_there_are_any() -> None:
    answer = search(replace(small(settings=MIXTURE, memory_gb=6.0), top=1))
    assert answer.best is not None
    moves = [*neighbouring_changes(answer.request, answer.best.candidate)]
    assert any(move.name.startswith("ep ") for move in moves)
