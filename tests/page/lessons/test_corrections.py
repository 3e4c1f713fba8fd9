"""What a claim says and what holds, in words that people read."""

from __future__ import annotations

import pytest

from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.corrections import _WORDS, corrections, value_text


@pytest.mark.system("S60")
def test_a_correction_says_both_and_why() -> None:
    (one,) = corrections("llm-training-05")
    assert one.said == "ZeRO 2 saves 8x of gradients and optimizer state, at N = 4, 64"
    assert one.holds == (
        "8x is the limit of the total; gradients and optimizer state shrink N-fold. In numbers: "
        "gradients and optimizer state = 4, 64; all states = 2.909, 7.211."
    )


def test_values_are_words() -> None:
    assert value_text({"of_all": 40.0, "KV_GB": [1, 2500.5]}) == (
        "of all = 40; GB of keys and values = 1, 2,500.5"
    )
    nested = {"forward": {"all_gather": 0, "all_reduce": 1}, "backward": {"all_reduce": 2}}
    assert value_text(nested) == "forward: all gather = 0, all reduce = 1; backward: all reduce = 2"
    assert value_text("as it is") == "as it is"
    assert value_text(5368709120) == "5,368,709,120"


def test_what_a_claim_says_already_is_not_said_again() -> None:
    (one,) = corrections("llm-training-09")
    assert one.said == "context parallelism all-reduces outputs of attention"
    assert one.holds.startswith("keys gathered or handed around; their gradients scattered. Its")


def test_what_is_right_is_said_to_be() -> None:
    (found,) = corrections("llm-training-28")
    assert found.said.endswith(": 64, 32")
    assert found.holds == "that is right."


def test_a_number_is_no_number_of_a_list() -> None:
    (one,) = corrections("distributed-08")
    assert one.holds == "25: Bits taken for bytes, as in distributed-07."
    (other,) = corrections("distributed-18")
    assert other.said == "an all-reduce against an all-gather: times the bytes: 1"
    assert other.holds.startswith("2: The lines above it say M against 2 M")


def test_every_name_that_is_put_into_words_is_one_of_a_claim() -> None:
    named = {
        name
        for claim in all_claims()
        for value in (claim.holds, claim.said)
        if isinstance(value, dict)
        for name in value
    }
    assert set(_WORDS) - named == set()


def test_an_id_of_no_claim_is_refused() -> None:
    with pytest.raises(KeyError, match="distributed-99"):
        corrections("distributed-99")
