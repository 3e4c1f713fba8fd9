"""Corrections say what a guide says and what holds, as the errata have it."""

from __future__ import annotations

import pytest

from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.catalog import lesson_book
from echelon.page.lessons.corrections import corrections


@pytest.mark.system("S60")
def test_what_is_wrong_says_what_holds_and_why() -> None:
    (found,) = corrections("distributed-18")
    assert found.id == "distributed-18"
    assert found.said == "an all-reduce against an all-gather: times the bytes: 1"
    assert found.holds.startswith("2. The lines above it say M against 2 M")


def test_a_value_that_its_sentence_has_is_not_told_again() -> None:
    (found,) = corrections("distributed-03")
    assert found.said == "a linear that is cut by columns is combined by an all-reduce"


def test_what_is_right_is_said_to_be() -> None:
    (found,) = corrections("llm-training-28")
    assert found.said.endswith(": 64, 32")
    assert found.holds == "that is right."


def test_an_unknown_claim_is_refused() -> None:
    with pytest.raises(KeyError):
        corrections("distributed-0")


def test_lessons_name_claims_of_the_errata() -> None:
    known = {claim.id for claim in all_claims()}
    named = {one.id for lesson in lesson_book().lessons for one in lesson.corrections}
    assert named <= known
    assert len(named) > 20
