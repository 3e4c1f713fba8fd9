"""What speaks against a neighbour is true: rules exist, bytes are over, terms add up."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from echelon.core.rulebook import all_rules
from echelon.planner.explain.neighbours import (
    Neighbour,
    NeighbourOutcome,
    candidate_differences,
    explain_neighbours,
    fullest_rank,
    neighbouring_changes,
)
from echelon.planner.predict.estimate import peak_bytes_by_place
from echelon.planner.search.pins import SELECTIVE, pin_word
from echelon.planner.search.ranked import estimate_candidate
from echelon.planner.search.search import SearchResult, best_fitting_plan, search
from tests.planner.requests import MIXTURE, small


@lru_cache(maxsize=1)
def _told() -> tuple[SearchResult, tuple[Neighbour, ...]]:
    answer = search(replace(small(memory_gb=4.0, pins=["cp=1"]), top=1))
    return answer, explain_neighbours(answer)


def _outcomes() -> list[NeighbourOutcome]:
    _, neighbours = _told()
    both = [part for one in neighbours for part in (one.by_itself, one.at_best)]
    return [part for part in both if part is not None]


@pytest.mark.slow
def test_the_terms_that_beat_a_neighbour_add_up_the_largest_first() -> None:
    slower = [one for one in _outcomes() if one.slower_s is not None]
    assert slower
    for one in slower:
        assert one.slower_s is not None
        amounts = [amount.value for amount in one.terms.values()]
        assert sum(amounts) == pytest.approx(one.slower_s.value, abs=1e-12)
        assert [abs(amount) for amount in amounts] == sorted(map(abs, amounts), reverse=True)
        assert one.slower_s.low <= one.slower_s.value <= one.slower_s.high
        for amount in one.terms.values():
            assert amount.low <= amount.value <= amount.high


def test_what_is_too_large_is() -> None:
    answer, _ = _told()
    assert answer.best is not None
    large = [one for one in _outcomes() if one.verdict == "too large" and one.plan is not None]
    assert large
    for one in large:
        assert one.plan is not None
        held = estimate_candidate(answer.request, one.plan.candidate)
        assert held.bytes_held - answer.request.memory_bytes == pytest.approx(one.over_bytes)
        best = estimate_candidate(answer.request, answer.best.candidate)
        grown = {key: held.bytes[key] - best.bytes[key] for key in held.bytes}
        if not one.grown:
            # Closed forms say a little more than lists do, by which the best plan fits.
            assert best.bytes_held > answer.request.memory_bytes
            assert max(grown.values()) <= 0
            continue
        name, more = one.grown[0]
        assert more == grown[name] == max(grown.values())


def test_what_is_refused_breaks_a_rule_that_is_explained() -> None:
    known = {rule.id for rule in all_rules()}
    refused = [one for one in _outcomes() if one.verdict == "refused"]
    assert refused
    assert all(one.rules and {*one.rules} <= known for one in refused)


def test_a_neighbour_is_the_best_that_has_the_change() -> None:
    answer, neighbours = _told()
    assert answer.best is not None
    for one in neighbours:
        plan, exact = one.at_best.plan, one.by_itself
        if plan is None or one.at_best.slower_s is None:
            continue
        mesh = plan.candidate.mesh
        for name, value in one.pins.items():
            chosen = plan.candidate.operators and not plan.candidate.recompute
            told = plan.candidate.pin_value(name) == pin_word(name, value)
            assert chosen if value == SELECTIVE else told
        assert mesh.world_size == answer.best.candidate.devices
        pins = answer.request.pins
        for name, value in one.pins.items():
            pins = pins.having(name, value)
        closed = best_fitting_plan(replace(answer.request, pins=pins))
        assert closed is not None
        assert plan.estimate.step_s <= 1.05 * closed.value
        if exact is not None and exact.slower_s is not None:
            assert one.at_best.share <= exact.share + 1e-9


def test_the_fullest_rank_of_a_pipeline_is_the_place_whose_lists_hold_most() -> None:
    best = search(replace(small(pins=["pp=2", "schedule=1f1b", "cp=1", "tp=1"]), top=1)).first
    assert best.plan is not None
    first, last = (sum(terms.values()) for terms in peak_bytes_by_place(best.plan))
    place, ranks = (0, "0 to 3") if first >= last else (1, "4 to 7")
    assert fullest_rank(best) == f"pp rank {place} (ranks {ranks})"


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
