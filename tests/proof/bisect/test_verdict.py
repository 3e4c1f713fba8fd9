"""The numbers between one and a half of a given one."""

from __future__ import annotations

import pytest

from echelon.proof.bisect.verdict import halves


@pytest.mark.parametrize(
    ("number", "least", "found"), [(12, 1, [1, 3, 6]), (8, 2, [2, 4]), (1, 1, []), (3, 2, [])]
)
def test_the_smallest_half_comes_first(number: int, least: int, found: list[int]) -> None:
    assert halves(number, least=least) == found
