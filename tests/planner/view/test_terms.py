"""Rounded numbers add up to the rounded total, whatever the terms are."""

from __future__ import annotations

from fractions import Fraction
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.planner.view.terms import (
    apportion,
    require_valid_terms,
    round_bytes,
    round_seconds,
)

values = st.lists(st.floats(0, 1e12), min_size=1, max_size=12)


@given(values, st.integers(0, 10**6))
def test_shares_add_up_and_none_is_off_by_one(numbers: list[float], units: int) -> None:
    counts = apportion(numbers, units)
    total = sum(map(Fraction, numbers))
    assert sum(counts) == (units if total else 0)
    for count, number in zip(counts, numbers, strict=True):
        assert abs(count - (Fraction(number) * units / total if total else 0)) < 1


def test_the_largest_remainders_get_what_is_left() -> None:
    assert apportion([1, 1, 1], 100) == [34, 33, 33]
    assert apportion([2.6, 1.0, 6.4], 10) == [3, 1, 6]


@given(values)
def test_what_is_printed_of_terms_sums_to_what_is_printed_of_the_total(
    numbers: list[float],
) -> None:
    terms = {f"t{place}": number for place, number in enumerate(numbers)}
    for shown in (round_seconds(terms), round_bytes(terms)):
        parts = [Fraction(shown.value(name).split()[0].replace(",", "")) for name in terms]
        assert sum(parts) == Fraction(shown.value().split()[0].replace(",", ""))
        shares = [Fraction(shown.share(name).split()[0]) for name in terms]
        assert sum(shares) == (100 if any(numbers) else 0)


def test_units_suit_the_total() -> None:
    assert round_seconds({"a": 12.3456, "b": 0.0004}).value() == "12.346 s"
    assert round_seconds({"a": 0.0123456}).value() == "12.346 ms"
    assert round_seconds({"a": 1234.5678}).value("a") == "1,234.6 s"
    assert round_bytes({"a": 2**30, "b": 2**29}).value() == "1.50 GiB"
    assert round_bytes({"a": 100.0}).value() == "100 B"


@pytest.mark.parametrize("bad", [-1.0, nan, float("inf")])
def test_what_is_no_number_from_zero_up_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="term 'slack'"):
        require_valid_terms({"slack": bad})
