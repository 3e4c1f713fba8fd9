"""What holds of claims about memory is what the formulas of `cost/` give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from echelon.handbook.errata.claims import all_claims
from echelon.handbook.errata.memory import MEMORY
from echelon.handbook.errata.other_claims import agrees_to_given_digits, computed_value

CLAIMS = {claim.id: claim for claim in all_claims()}


@pytest.mark.parametrize("name", MEMORY)
def test_our_formulas_give_what_holds(name: str) -> None:
    claim = CLAIMS[name]
    ours = computed_value(claim)
    assert agrees_to_given_digits(ours, claim.holds), f"{claim.claim}: {ours}, not {claim.holds}"


@pytest.mark.parametrize(
    ("name", "inputs", "value"),
    [
        ("distributed-32", {}, 16.0),
        ("llm-training-12", {"psi": 7e9}, 112.0),
    ],
)
def test_values_by_hand(name: str, inputs: dict[str, object], value: object) -> None:
    assert MEMORY[name](SimpleNamespace(**inputs)) == pytest.approx(value)
