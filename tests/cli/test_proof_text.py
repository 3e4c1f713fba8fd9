"""The words of `echelon prove`, on results that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cli.prove import bisection_text, proof_text
from echelon.core.rulebook.prove import PROVE_LOSS, PROVE_PARAMETERS
from echelon.core.rules import Rule
from echelon.proof.bisect.verdict import Bisection, NeededPart
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.verdict import ProofPass, SubjectProof
from tests.proof.test_verdict import HOLDS, proof


def claim(rule: Rule, error: float, allowed: float) -> ClaimResult:
    """Return a claim of one comparison."""
    return judged(rule, rule.id, [Check(0, "w", error, allowed=allowed)], "")


def test_each_precision_has_a_column_and_a_failure_its_mark() -> None:
    exact = (claim(PROVE_LOSS, 1e-3, 1e-10), claim(PROVE_PARAMETERS, 0.0, 0.0))
    proof = SubjectProof(
        file="ddp.py",
        mesh="dp2",
        framework="torch",
        seed=0,
        num_steps=3,
        num_parameters=1,
        num_elements=4,
        versions={},
        passes=(
            ProofPass(precision="fp64", claims=exact, diagnosis=None),
            ProofPass(precision="fp32", claims=exact[1:], diagnosis=None),
        ),
    )
    text = proof_text(proof)
    assert text.startswith("ddp.py: dp2 beside one device, 3 steps, seed 0; 1 parameter of 4")
    rows = [line.split() for line in text.splitlines()[2:5]]
    assert rows[0] == ["claim", "compared", "fp64", "fp32"]
    assert rows[1] == ["prove-loss", "1", "1.0e-03", "of", "1.0e-10", "FAILS", "-"]
    assert rows[2] == ["prove-parameters", "1", "equal", "equal"]
    assert text.endswith("NOT PROVEN\n")


def test_what_was_not_compared_stands_under_the_table() -> None:
    beside = ProofPass(precision="fp64", claims=(HOLDS,), diagnosis=None, note="not compared")
    lines = proof_text(replace(proof(HOLDS), independent=beside)).splitlines()
    assert lines[5] == "the one process beside an independent implementation"
    assert lines[8].startswith("the loss is right")
    assert lines[9:] == ["", "not compared", "", "proven"]


def test_a_bisection_tells_what_is_needed_and_the_numbers_of_a_program() -> None:
    found = Bisection(
        rule="prove-loss",
        needed=(NeededPart(name="MESH['dp'] = 2", without="proven"),),
        left_out=("WIDTH = 8",),
        sizes={"ranks": 2, "steps": 1},
        files={"ddp.py": 'MESH = {"dp": 2}\nNUM_STEPS = 1\n'},
        diagnosis=None,
        summary="first wrong: loss",
        num_proofs=5,
    )
    lines = bisection_text(found).splitlines()
    assert lines[0] == "the smallest that breaks prove-loss (5 proofs): ranks 2, steps 1"
    assert "it does not need: WIDTH = 8" in lines
    assert lines[-2:] == ["MESH['dp'] = 2", "NUM_STEPS = 1"]


@pytest.mark.parametrize("columns", [60, 80, 120, 160])
def test_no_line_is_wider_than_the_page(columns: int) -> None:
    beside = ProofPass(precision="fp64", claims=(HOLDS,), diagnosis=None, note="not " * 60)
    found = Bisection(
        rule="prove-loss",
        needed=(NeededPart(name="MESH['dp'] = 2", without="proven " * 40),),
        left_out=("WIDTH = 8",) * 20,
        sizes={"ranks": 2, "steps": 1},
        files={},
        diagnosis=None,
        summary="first wrong: loss, by the factor of two that is wanted " * 5,
        num_proofs=5,
    )
    for text in (
        proof_text(replace(proof(HOLDS), independent=beside), columns=columns),
        bisection_text(found, columns=columns),
    ):
        longest = max(map(len, text.splitlines()))
        assert columns - 25 < longest <= columns
