"""Ties between 8-bit numbers are decided as ranks did, and nothing else is explained by them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from echelon.core.mesh import Mesh
from echelon.core.plan import Plan
from echelon.proof.claims.claims import judge
from echelon.proof.claims.conditioning import with_fp8_ties_of_ranks
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.oracle.fp8 import Tie, TieNotes
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.parallel.test_fp8_linear import FP8, SCATTERED, latent
from tests.proof import replicas as evidence
from tests.proof.layouts import layout

STEPS = 2


def narrow() -> Plan:
    """Return a plan on one rank some of whose numbers are ties."""
    plan = shrink(latent(layout(**SCATTERED, precision=FP8)), precision="fp64")
    return replace(plan, layout=replace(plan.layout, mesh=Mesh(), sequence_parallel=False))


def ties_of(plan: Plan) -> list[Tie]:
    notes = TieNotes()
    run_oracle(plan, STEPS, ties=notes)
    return notes.found


def ranks_that_flip(plan: Plan, ties: set[Tie], patch: pytest.MonkeyPatch) -> PlanEvidence:
    """Return the evidence of ranks that rounded these ties to the other side."""
    flipping = partial(run_oracle, ties=TieNotes(frozenset(ties)))
    with patch.context() as changed:
        changed.setattr(evidence, "run_oracle", flipping)
        found = evidence.replicas(plan, STEPS)
    return replace(found, steps=run_oracle(plan, STEPS))


def test_ties_are_decided_as_the_ranks_did(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = narrow()
    (first, *_), last = ties_of(plan), ties_of(plan)[-1]
    for ties in ({first}, {last}):
        found = ranks_that_flip(plan, ties, monkeypatch)
        results = judge(found)
        assert any(not result.holds for result in results)
        after, results = with_fp8_ties_of_ranks(found, results)
        assert all(result.holds for result in results)
        # As sharp as without ties.
        assert after.tolerance == found.tolerance


def test_what_no_tie_explains_stays() -> None:
    plan = narrow()
    wrong = evidence.replicas(
        plan, STEPS, shard=lambda piece: piece.tensor * (1 + 1e-6 * (piece.kind == "gradients"))
    )
    before = judge(wrong)
    after, results = with_fp8_ties_of_ranks(wrong, before)
    assert [one.holds for one in results] == [one.holds for one in before]
    assert not all(one.holds for one in results)
    assert after.steps is wrong.steps


def test_what_is_right_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = evidence.replicas(narrow(), STEPS)
    results = judge(right)
    monkeypatch.setattr("echelon.proof.claims.tolerance.run_oracle", None)
    assert with_fp8_ties_of_ranks(right, results) == (right, results)
