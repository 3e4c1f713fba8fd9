"""Bytes of one collective: what a ring sends, counted send by send."""

from __future__ import annotations

from math import isclose

import pytest

from echelon.cost.bytes.terms import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)


def ring_sends(payload: int, degree: int, rounds: int) -> int:
    """Return what one rank of a ring sends: one piece to its neighbour in each round."""
    return sum(payload // degree for _ in range(rounds))


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_formulas_equal_a_ring_send_by_send(degree: int) -> None:
    payload = 12 * 8
    phase = ring_sends(payload, degree, degree - 1)
    assert all_gather_bytes(payload // degree, degree) == phase
    assert reduce_scatter_bytes(payload // degree, degree) == phase
    assert all_reduce_bytes(payload, degree) == 2 * phase
    assert all_to_all_bytes(payload, degree) == phase


@pytest.mark.parametrize(
    ("degree", "gather", "reduce"),
    [(2, 0.5, 1.0), (4, 0.75, 1.5), (8, 0.875, 1.75), (64, 0.9844, 1.9688)],
)
def test_published_multiples_of_the_whole_buffer(degree: int, gather: float, reduce: float) -> None:
    whole = 64 * 1000
    assert isclose(all_gather_bytes(whole // degree, degree) / whole, gather, rel_tol=1e-4)
    assert isclose(reduce_scatter_bytes(whole // degree, degree) / whole, gather, rel_tol=1e-4)
    assert isclose(all_to_all_bytes(whole, degree) / whole, gather, rel_tol=1e-4)
    assert isclose(all_reduce_bytes(whole, degree) / whole, reduce, rel_tol=1e-4)


def test_an_all_reduce_costs_twice_an_all_gather() -> None:
    for degree in (2, 3, 4, 8):
        assert all_reduce_bytes(24, degree) == 2 * all_gather_bytes(24 // degree, degree)


def test_one_rank_sends_nothing() -> None:
    formulas = (all_reduce_bytes, all_gather_bytes, reduce_scatter_bytes, all_to_all_bytes)
    assert [formula(1000, 1) for formula in formulas] == [0, 0, 0, 0]
