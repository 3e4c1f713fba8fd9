"""The page of a rehearsal: the verdict, a few ranks, and what moves most bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cli.rehearsal_text import MOST_RANKS, rehearsal_text
from echelon.core.rulebook.rehearse import REHEARSE_MISSING
from echelon.rehearsal.result import Rehearsal, RehearsalFault
from echelon.rehearsal.run import rehearse
from tests.rehearsal.test_run import plan_of


@pytest.fixture(scope="module")
def found() -> Rehearsal:
    flags = ("mesh.pp=2", "model.layers=4", "batch.global_sequences=64")
    return rehearse(plan_of(*flags), workers=1)


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_a_page_fits(found: Rehearsal, columns: int) -> None:
    page = rehearsal_text(found, columns=columns)
    assert max(map(len, page.splitlines())) <= columns
    assert "holds:" in page


def test_what_was_rehearsed_and_what_a_step_has_are_said(found: Rehearsal) -> None:
    page = " ".join(rehearsal_text(found, columns=100).split())
    assert f"two steps of {found.plan.num_microbatches} of {found.num_microbatches}" in page
    assert "1 distinct rank rehearsed" in rehearsal_text(
        replace(found, ranks=found.ranks[:1]), columns=100
    )


def test_the_fullest_ranks_are_shown(found: Rehearsal) -> None:
    more = replace(found, ranks=found.ranks * MOST_RANKS)
    page = rehearsal_text(more, columns=100)
    assert sum("pp0" in line or "pp1" in line for line in page.splitlines()) == MOST_RANKS


def test_faults_are_counted(found: Rehearsal) -> None:
    fault = RehearsalFault(rule=REHEARSE_MISSING, ranks=(), text="a call is missing")
    page = rehearsal_text(replace(found, faults=(fault,)), columns=100)
    assert "DOES NOT HOLD: 1 fault" in page
    assert "holds:" not in page
