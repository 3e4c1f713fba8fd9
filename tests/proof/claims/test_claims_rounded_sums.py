"""A sum that is off by more than its bound breaks the claim, and one that is not keeps it."""

from __future__ import annotations

import pytest

from echelon.core.rulebook.prove import PROVE_QUANTISED_SUMS
from echelon.proof.claims.claims import WITHIN_BOUNDS, _check, judged
from echelon.proof.sum_bounds import SumNote


@pytest.mark.parametrize(("error", "holds"), [(0.5, True), (1.0, True), (1.01, False)])
def test_the_error_is_a_share_of_the_bound(error: float, holds: bool) -> None:
    note = SumNote(step=1, name="head.weight", error=error * 2e-3, bound=2e-3)
    result = judged(PROVE_QUANTISED_SUMS, WITHIN_BOUNDS, [_check(note, "int8", 0)])
    assert result.holds is holds
    assert result.max_error == pytest.approx(error)
    assert (result.allowed, result.worst) == (1.0, "head.weight")


def test_nothing_may_be_off_where_nothing_was_rounded() -> None:
    for error, holds in ((0.0, True), (1e-12, False)):
        note = SumNote(step=0, name="norm.weight", error=error, bound=0.0)
        assert judged(PROVE_QUANTISED_SUMS, "", [_check(note, "int4", 0)]).holds is holds
