"""What holds of claims about meshes, links, batches and rates is what is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from echelon.handbook.errata.claims import all_claims
from echelon.handbook.errata.other_claims import OTHERS, agrees_to_given_digits, computed_value

CLAIMS = {claim.id: claim for claim in all_claims()}


@pytest.mark.parametrize("name", OTHERS)
def test_our_formulas_give_what_holds(name: str) -> None:
    claim = CLAIMS[name]
    ours = computed_value(claim)
    assert agrees_to_given_digits(ours, claim.holds), f"{claim.claim}: {ours}, not {claim.holds}"


@pytest.mark.parametrize(
    ("name", "inputs", "value"),
    [
        ("distributed-30", {"world": 64, "tp": 8, "pp": 4, "cp": 1}, 2),
        ("distributed-07", {"Gbps": [100, 400]}, [12.5, 50.0]),
    ],
)
def test_values_by_hand(name: str, inputs: dict[str, object], value: object) -> None:
    assert OTHERS[name](SimpleNamespace(**inputs)) == pytest.approx(value)
