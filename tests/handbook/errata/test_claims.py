"""The claims as data are whole, and are selected by id, verdict, topic and guide."""

from __future__ import annotations

from collections import Counter

import pytest

from echelon.handbook.errata.claims import GUIDES, all_claims, select_claims, topics
from echelon.handbook.errata.other_claims import COMPUTED

CLAIMS = {claim.id: claim for claim in all_claims()}


def test_the_data_are_whole() -> None:
    claims = all_claims()
    assert Counter(claim.verdict for claim in claims) == {"ok": 51, "wrong": 48, "ambiguous": 58}
    assert len(CLAIMS) == len(claims) == 157
    assert Counter(claim.guide for claim in claims) == {
        "distributed": 56,
        "llm-training": 76,
        "scaling": 21,
        "between": 4,
    }
    assert {claim.guide for claim in claims} == set(GUIDES)
    assert set(COMPUTED) <= set(CLAIMS)
    assert all(claim.topic in topics() and claim.where and claim.claim for claim in claims)
    assert select_claims("no such word") == ()


@pytest.mark.parametrize(
    ("word", "count"), [("wrong", 48), ("bubble", 10), ("scaling", 21), ("llm-training-23a", 1)]
)
def test_a_word_selects(word: str, count: int) -> None:
    assert len(select_claims(word)) == count


def test_the_guide_of_a_claim_stands_before_its_number() -> None:
    assert CLAIMS["llm-training-23a"].guide == "llm-training"
    assert CLAIMS["between-02"].guide == "between"
