"""What a claim says and what holds, in words that people read."""

from __future__ import annotations

import pytest

from echelon.page.lessons.corrections import corrections, value_text


def test_a_correction_says_both_and_why() -> None:
    (one,) = corrections("llm-training-05")
    assert one.said == "ZeRO 2 saves 8x of gradients and optimizer state, at N = 4, 64: 8x"
    assert one.holds == (
        "grads opt 4, 64; total 2.909, 7.211. 8x is the limit of the total; gradients and "
        "optimizer state shrink N-fold."
    )


def test_values_are_words() -> None:
    assert value_text({"per_gpu": 40.0, "all": [1, 2500.5]}) == "per gpu 40; all 1, 2,500.5"
    assert value_text("as it is") == "as it is"
    assert value_text(5368709120) == "5,368,709,120"


def test_an_id_of_no_claim_is_refused() -> None:
    with pytest.raises(KeyError, match="distributed-99"):
        corrections("distributed-99")
