"""What tutorials say about ZeRO, each fact recomputed by the formulas of the product."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cost.bytes.golden.golden_traffic import COMMUNICATION, GRIDS
from tests.cost.bytes.golden.golden_zero import MEMORY, Fact

FACTS = (*MEMORY, *COMMUNICATION, *GRIDS)


def agree(ours: Any, correct: Any) -> bool:
    """Return whether two values agree, to the digits to which published ones are rounded."""
    if isinstance(correct, list):
        pairs = zip(ours, correct, strict=True)
        return all(agree(one, other) for one, other in pairs)
    if isinstance(correct, bool | str) or correct is None:
        return ours == correct
    return ours == pytest.approx(correct, rel=3e-4)


@pytest.mark.system("S44")
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.id)
def test_our_formulas_give_the_fact(fact: Fact) -> None:
    assert agree(fact.ours(), fact.correct), f"{fact.claim}: {fact.ours()}, not {fact.correct}"


def test_no_fact_is_missing_or_told_twice() -> None:
    ids = [fact.id for fact in FACTS]
    numbers = [f"002-{n}" for n in range(31, 51)]
    numbers += [f"003-{n:02}" for n in (4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22)]
    numbers += ["003-23a", "003-23b", "003-23c", *(f"003-{n}" for n in range(63, 72))]
    assert sorted(ids) == sorted([*numbers, "004-03", "004-17", "X-02", "X-04"])
