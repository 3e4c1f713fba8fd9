"""A bug in shared code, which no rank beside the oracle shows, is caught, and its part named."""

from __future__ import annotations

import pytest

from echelon.proof.independent.naming import independent_pass
from tests.proof.independent.planted_bugs import BUGS, SharedBug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_in_shared_code_is_named(bug: SharedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bug.plan()
    bug.plant(monkeypatch)
    found = independent_pass(plan, 2)
    assert not found.holds
    assert found.diagnosis is not None
    assert found.diagnosis.rule == "prove-independent"
    assert (found.diagnosis.where, found.diagnosis.tensor) == (bug.part, bug.tensor)
