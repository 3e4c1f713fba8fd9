"""What holds of claims about what is sent is what the formulas of `cost/` give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from echelon.handbook.errata.claims import all_claims
from echelon.handbook.errata.memory import VOLUME
from echelon.handbook.errata.other_claims import agrees_to_given_digits, computed_value

CLAIMS = {claim.id: claim for claim in all_claims()}


@pytest.mark.parametrize("name", VOLUME)
def test_our_formulas_give_what_holds(name: str) -> None:
    claim = CLAIMS[name]
    ours = computed_value(claim)
    assert agrees_to_given_digits(ours, claim.holds), f"{claim.claim}: {ours}, not {claim.holds}"


@pytest.mark.parametrize(
    ("name", "inputs", "value"),
    [
        ("distributed-15", {"N": 4}, 0.75),
        ("scaling-01", {"N": 4}, 6),
    ],
)
def test_values_by_hand(name: str, inputs: dict[str, object], value: object) -> None:
    assert VOLUME[name](SimpleNamespace(**inputs)) == pytest.approx(value)
