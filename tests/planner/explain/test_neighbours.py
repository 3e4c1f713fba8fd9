"""What speaks against a neighbour is true: rules exist, bytes are over, terms add up."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from echelon.core.rulebook import all_rules
from echelon.planner.explain.moves import moves_of
from echelon.planner.explain.neighbours import Neighbour, Outcome, why_not
from echelon.planner.ranked import estimate_choice
from echelon.planner.search import Answer, search
from echelon.planner.unfit import any_plan
from tests.planner.requests import MIXTURE, small


@lru_cache(maxsize=1)
def _told() -> tuple[Answer, tuple[Neighbour, ...]]:
    answer = search(replace(small(memory_gb=4.0, pins=["cp=1"]), top=1))
    return answer, why_not(answer)


def _outcomes() -> list[Outcome]:
    _, neighbours = _told()
    both = [part for one in neighbours for part in (one.exact, one.free)]
    return [part for part in both if part is not None]


def test_the_terms_that_beat_a_neighbour_add_up_the_largest_first() -> None:
    slower = [one for one in _outcomes() if one.slower_s is not None]
    assert slower
    for one in slower:
        assert one.slower_s is not None
        amounts = [term.amount.value for term in one.terms]
        assert sum(amounts) == pytest.approx(one.slower_s.value, abs=1e-12)
        assert [abs(amount) for amount in amounts] == sorted(map(abs, amounts), reverse=True)
        assert one.slower_s.low <= one.slower_s.value <= one.slower_s.high
        for term in one.terms:
            assert term.amount.low <= term.amount.value <= term.amount.high


def test_what_is_too_large_is() -> None:
    answer, _ = _told()
    assert answer.best is not None
    large = [one for one in _outcomes() if one.verdict == "too large" and one.plan is not None]
    assert large
    for one in large:
        assert one.plan is not None
        held = estimate_choice(answer.request, one.plan.choice)
        assert held.bytes_held - answer.request.memory_bytes == pytest.approx(one.over_bytes)
        name, more = one.grown[0]
        best = estimate_choice(answer.request, answer.best.choice)
        grown = {key: held.bytes[key] - best.bytes[key] for key in held.bytes}
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
        plan, exact = one.free.plan, one.exact
        if plan is None or one.free.slower_s is None:
            continue
        mesh = plan.choice.mesh
        for name, value in one.pins.items():
            holder = mesh if hasattr(mesh, name) else plan.choice
            assert getattr(holder, name) == value
        assert mesh.world_size == answer.best.choice.devices
        pins = answer.request.pins
        for name, value in one.pins.items():
            pins = pins.having(name, value)
        closed = any_plan(replace(answer.request, pins=pins))
        assert closed is not None
        assert plan.estimate.step_s <= 1.05 * closed.value
        if exact is not None and exact.slower_s is not None:
            assert one.free.share <= exact.share + 1e-9


def test_one_change_is_one_change() -> None:
    answer, _ = _told()
    assert answer.best is not None
    choice = answer.best.choice
    names: list[str] = []
    for move in moves_of(answer.request, choice):
        names.append(move.name)
        assert move.exact is None or move.exact != choice
        assert move.exact is None or move.exact.devices == choice.devices
    assert len(names) == len(set(names)) >= 7
    assert any(name.startswith("tp ") for name in names)
    assert any(name.startswith("ZeRO ") for name in names)


def test_pins_leave_out_what_they_exclude() -> None:
    request = small(pins=["tp=2", "zero=1", "cp=1"])
    answer = search(replace(request, top=1))
    assert answer.best is not None
    moves = [*moves_of(request, answer.best.choice)]
    assert moves
    assert not any({*move.pins} & {"zero", "cp"} for move in moves)
    assert all(move.pins.get("tp", 2) == 2 for move in moves)


def test_experts_are_asked_about_where_there_are_any() -> None:
    answer = search(replace(small(settings=MIXTURE, memory_gb=6.0), top=1))
    assert answer.best is not None
    moves = [*moves_of(answer.request, answer.best.choice)]
    assert any(move.name.startswith("ep ") for move in moves)
