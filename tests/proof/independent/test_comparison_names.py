"""A bug in shared code, which no rank beside the oracle shows, is caught, and its part named."""

from __future__ import annotations

import pytest

from echelon.proof.independent.comparison import independent_pass
from tests.proof.independent import model_bugs, training_bugs
from tests.proof.independent.shared_bugs import BUGS, SharedBug

PLANTED = {model_bugs.__name__, training_bugs.__name__}


def test_bugs_are_planted_in_the_model_and_in_training() -> None:
    assert {bug.plant.__module__ for bug in BUGS} == PLANTED
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 40


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_in_shared_code_is_named(bug: SharedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bug.plan()
    bug.plant(monkeypatch)
    found = independent_pass(plan, bug.num_steps)
    assert not found.holds
    assert found.diagnosis is not None
    assert found.diagnosis.rule == "prove-independent"
    assert (found.diagnosis.where, found.diagnosis.tensor) == (bug.part, bug.tensor)
