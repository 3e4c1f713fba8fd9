"""What holds of each claim is what our formulas give, from the claim's own inputs."""

from __future__ import annotations

from collections import Counter

import pytest

from echelon.planner.errata.claims import GUIDES, VERDICTS, all_claims, select, topics
from echelon.planner.errata.computed import COMPUTED, agrees, computed, is_number

CLAIMS = {claim.id: claim for claim in all_claims()}
FORMULAS = ("memory", "volume", "bubble")
"""Topics of which every claim that is right is reproduced."""

TOLD = {"003-02", "003-47"}
"""Numbers that are told: those of a data sheet, and what an implementation chooses to hold."""


@pytest.mark.parametrize("name", COMPUTED)
def test_our_formulas_give_what_holds(name: str) -> None:
    claim = CLAIMS[name]
    ours = computed(claim)
    assert agrees(ours, claim.holds), f"{claim.claim}: {ours}, not {claim.holds}"


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_number_is_computed(verdict: str) -> None:
    numbers = {claim.id for claim in select(verdict) if is_number(claim.holds)}
    assert numbers - set(COMPUTED) - TOLD == set()


def test_every_right_claim_on_memory_volume_and_bubble_is_reproduced() -> None:
    right = [claim for claim in select("ok") if claim.topic in FORMULAS]
    assert len(right) == 28
    for claim in right:
        ours = computed(claim)
        assert ours is not None
        assert agrees(ours, claim.holds)


def test_what_is_wrong_holds_something_else_than_was_said() -> None:
    for claim in select("wrong"):
        assert claim.holds != claim.said
        assert claim.why
        if is_number(claim.said) and is_number(claim.holds):
            assert not agrees(claim.said, claim.holds)


def test_the_data_are_whole() -> None:
    claims = all_claims()
    assert Counter(claim.verdict for claim in claims) == {"ok": 51, "wrong": 48, "ambiguous": 58}
    assert len(CLAIMS) == len(claims) == 157
    assert Counter(claim.guide for claim in claims) == {"002": 56, "003": 76, "004": 21, "X": 4}
    assert {claim.guide for claim in claims} == set(GUIDES)
    assert set(COMPUTED) <= set(CLAIMS)
    assert all(claim.topic in topics() and claim.where and claim.claim for claim in claims)
    assert select("no such word") == ()


@pytest.mark.parametrize(
    ("ours", "holds", "same"),
    [
        (0.005825, 0.0058, True),
        (0.00593, 0.0058, False),
        (13.9, 14, False),
        (14.0, 14, True),
        ([1.0, 2.0], [1, 2], True),
        ([1.0], [1, 2], False),
        ({"a": 0.42857}, {"a": 0.4286}, True),
        ({"b": 1}, {"a": 1}, False),
        ("never", "never", True),
    ],
)
def test_values_agree_to_the_digits_that_are_given(ours: object, holds: object, same: bool) -> None:
    assert agrees(ours, holds) is same
