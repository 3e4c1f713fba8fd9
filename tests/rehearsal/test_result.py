"""What is told of a rehearsal."""

from __future__ import annotations

import pytest

from echelon.core.errors import ProofFailed
from echelon.core.rulebook.planner import REHEARSE_DEADLOCK
from echelon.rehearsal.run import RehearsalFault, rehearse
from tests.rehearsal.test_run import plan_of


def test_a_fault_is_a_problem_with_its_rule_and_ranks() -> None:
    fault = RehearsalFault(rule=REHEARSE_DEADLOCK, ranks=(3, 4), text="they wait in a circle")
    said = fault.problem().render()
    assert "error[rehearse-deadlock]" in said
    assert "they wait in a circle (rank 3, 4)" in said


def test_memory_is_laid_beside_that_of_the_plan() -> None:
    found = rehearse(plan_of("mesh.pp=2", "model.layers=4"), workers=1)
    assert found.fullest.rank == 0
    rank = found.ranks[1]
    planned = sum(found.planned[1].values())
    assert found.memory_error(rank) == planned / rank.peak_bytes - 1
    told = found.to_json()["ranks"]
    assert isinstance(told, list)
    assert (told[1]["peak_bytes"], told[1]["planned_peak_bytes"]) == (rank.peak_bytes, planned)
    assert sum(told[1]["at_peak"].values()) == rank.peak_bytes
    found.require()


def test_faults_are_raised_together() -> None:
    from dataclasses import replace

    found = rehearse(plan_of(), workers=1)
    fault = RehearsalFault(rule=REHEARSE_DEADLOCK, ranks=(), text="a circle")
    wrong = replace(found, faults=(fault, replace(fault, text="another")))
    assert not wrong.holds
    with pytest.raises(ProofFailed) as failed:
        wrong.require()
    assert failed.value.rules == ("rehearse-deadlock",) * 2
