"""Every number of a claim is computed, and values agree to the digits that are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from echelon.handbook.errata.claims import VERDICTS, select_claims
from echelon.handbook.errata.other_claims import (
    COMPUTED,
    agrees_to_given_digits,
    computed_value,
)

FORMULAS = ("memory", "volume", "bubble")
"""Topics of which every claim that is right is reproduced."""

TOLD = {"llm-training-02", "llm-training-47"}
"""Numbers that are told: those of a data sheet, and what an implementation chooses to hold."""


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or consists of numbers."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        return all(map(is_number, entries.values()))
    if isinstance(value, list):
        return all(map(is_number, cast("list[Any]", value)))
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_number_is_computed(verdict: str) -> None:
    numbers = {claim.id for claim in select_claims(verdict) if is_number(claim.holds)}
    assert numbers - set(COMPUTED) - TOLD == set()


def test_every_right_claim_on_memory_volume_and_bubble_is_reproduced() -> None:
    right = [claim for claim in select_claims("ok") if claim.topic in FORMULAS]
    assert len(right) == 28
    for claim in right:
        ours = computed_value(claim)
        assert ours is not None
        assert agrees_to_given_digits(ours, claim.holds)


@pytest.mark.system("S60")
def test_what_is_wrong_holds_something_else_than_was_said() -> None:
    for claim in select_claims("wrong"):
        assert claim.holds != claim.said
        assert claim.why
        if is_number(claim.said) and is_number(claim.holds):
            assert not agrees_to_given_digits(claim.said, claim.holds)


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
    assert agrees_to_given_digits(ours, holds) is same
