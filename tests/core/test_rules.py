"""Rules: their problems, their page, and the values nearest to what was wanted."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.rules import Rule, did_you_mean, nearest_divisors
from tests.walks import examples

RULE = Rule(
    id="tp-divides-heads",
    why="""
    Each tensor rank holds whole heads.
    """,
    bad="""
    [mesh]
    tp = 3
    """,
    fixed="tp = 2",
)


def test_a_rule_makes_problems_of_its_own_id() -> None:
    problem = RULE.problem("tp = 3", key="mesh.tp", set_by="run.toml:2", suggestions=(1, 2))
    assert (problem.rule, problem.message) == ("tp-divides-heads", "tp = 3")
    assert (problem.key, problem.set_by, problem.suggestions) == (
        "mesh.tp",
        "run.toml:2",
        ("1", "2"),
    )


def test_the_page_of_a_rule() -> None:
    assert RULE.page() == (
        "tp-divides-heads\n\nEach tensor rank holds whole heads.\n\n"
        "Refused:\n    [mesh]\n    tp = 3\n\nWorks:\n    tp = 2\n"
    )


def test_a_suggestion_is_never_what_was_typed() -> None:
    assert did_you_mean("nano", ["nano", "nano-zero3"]) == ("nano-zero3",)
    assert did_you_mean("LLAMA3-8b", ["llama3-8b"]) == ("llama3-8b",)
    assert did_you_mean("adamw", ["AdamW"]) == ("AdamW",)


@pytest.mark.parametrize(
    ("number", "wanted", "expected"),
    [
        (6, 8, (1, 2, 3, 6)),
        (12, 5, (2, 3, 4, 6)),
        (1, 7, (1,)),
        (97, 4, (1, 97)),
        (64, 7, (1, 2, 4, 8)),
    ],
)
def test_nearest_divisors(number: int, wanted: int, expected: tuple[int, ...]) -> None:
    assert nearest_divisors(number, wanted) == expected


@given(st.integers(1, 2000), st.integers(1, 2000))
@settings(deadline=None, max_examples=examples(60))
def test_divisors_divide_and_no_nearer_one_is_left_out(number: int, wanted: int) -> None:
    found = nearest_divisors(number, wanted)
    others = [d for d in range(1, number + 1) if number % d == 0 and d not in found]
    assert all(number % d == 0 for d in found)
    assert list(found) == sorted(found)
    farthest = max(abs(d - wanted) for d in found)
    assert all(abs(d - wanted) >= farthest for d in others)
    assert len(found) == min(4, len(found) + len(others))


def test_did_you_mean() -> None:
    known = ("schedule", "stages", "virtual_stages")
    assert did_you_mean("shedule", known)[0] == "schedule"
    assert did_you_mean("xyz", known) == ()


def test_what_both_examples_share_is_said_once() -> None:
    rule = Rule("tp", "Why.", bad="tp = 4", fixed="tp = 3", example="heads = 6\n%s")
    assert (rule.bad, rule.fixed) == ("heads = 6\ntp = 4", "heads = 6\ntp = 3")
    assert set(asdict(rule)) == {"id", "why", "bad", "fixed"}
