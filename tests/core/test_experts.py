"""The room of an expert, and which balance has a loss, a bias, or counts before it computes."""

from __future__ import annotations

import pytest

from echelon.core.experts import Balance, BalanceKind, unrounded_capacity


def test_the_room_of_an_expert_is_rounded_up_once() -> None:
    # 1.25 x 4096 tokens x 8 of 256 experts.
    assert Balance(capacity_factor=1.25).capacity(4096, 256, 8) == 160
    assert Balance(capacity_factor=1.0).capacity(10, 4, 1) == 3
    assert Balance().capacity(4096, 256, 8) is None
    # 1.1 x 50 is a little more than 55 in floating point, and is no 56.
    assert 1.1 * 50 > 55
    assert Balance(capacity_factor=1.1).capacity(50, 1, 1) == 55
    assert unrounded_capacity(0.1, 24, 8, 2) == 0.6


@pytest.mark.parametrize(
    ("kind", "aux", "bias"),
    [("none", False, False), ("aux", True, False), ("bias", False, True), ("both", True, True)],
)
def test_a_balance_has_what_its_kind_says(kind: BalanceKind, aux: bool, bias: bool) -> None:
    assert (Balance(kind=kind).has_aux, Balance(kind=kind).has_bias) == (aux, bias)
    # The load of the global batch is that of the step before: nothing is counted first.
    assert not Balance(kind=kind).counts_first
    assert Balance(kind=kind, aux_over="sequence").counts_first is aux
    assert Balance(kind=kind, aux_over="microbatch").counts_first is aux
