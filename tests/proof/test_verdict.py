"""A proof as a value: what it says, as JSON, and as problems of the claims that are broken."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.errors import ProofFailed
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.proof.causes.diagnose import diagnose
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult, judge
from echelon.proof.verdict import Proof, ProofPass, SubjectProof
from tests.parallel.layouts import plan_of
from tests.proof.verify.captures import GRADIENT, Values, evidence_of

HOLDS = ClaimResult(
    rule=rules.PROVE_LOSS,
    statement="the loss is right",
    compared=2,
    max_error=1e-12,
    allowed=1e-10,
    worst="loss of rank 0",
    failures=(),
)
BROKEN = ClaimResult(
    rule=rules.PROVE_GRADIENTS,
    statement="every gradient is right",
    compared=3,
    max_error=math.inf,
    allowed=1e-10,
    worst="head.weight",
    failures=(
        Check(step=1, subject="norm.weight", error=0.5, allowed=1e-10, detail="off"),
        Check(step=2, subject="head.weight", error=math.inf, allowed=1e-10),
    ),
)


def proof(*claims: ClaimResult) -> Proof:
    plan = plan_of()
    return Proof(
        plan=plan.name,
        plan_hash=plan.content_hash(),
        mesh="1",
        shrunk_plan=plan,
        changes=(),
        subject="module:build",
        seed=7,
        num_steps=3,
        versions={"torch": "2"},
        passes=(
            ProofPass(precision="fp64", claims=(HOLDS,), diagnosis=None),
            ProofPass(precision="bf16", claims=claims, diagnosis=None),
        ),
    )


def test_a_proof_in_which_all_holds_asks_for_nothing() -> None:
    assert proof(HOLDS).proven
    assert proof(HOLDS).diagnosis is None
    proof(HOLDS).require()


def test_the_independent_pass_is_a_part_of_the_proof() -> None:
    beside = ProofPass(precision="fp64", claims=(BROKEN,), diagnosis=None, note="not compared")
    one = replace(proof(HOLDS), independent=beside)
    assert not one.proven
    assert len(one.every_pass) == 3
    assert isinstance(told := one.to_json()["independent"], dict)
    assert (told["precision"], told["holds"], told["note"]) == ("fp64", False, "not compared")
    with pytest.raises(ProofFailed):
        one.require()


def test_each_broken_claim_is_a_problem_that_names_its_first_failure() -> None:
    one = proof(HOLDS, BROKEN, replace(BROKEN, failures=BROKEN.failures[1:]))
    assert not one.proven
    assert [single.holds for single in one.passes] == [True, False]
    with pytest.raises(ProofFailed) as raised:
        one.require()
    assert raised.value.rules == ("prove-gradients",) * 2
    first, second = (problem.message for problem in raised.value.problems)
    assert first == (
        "every gradient is right does not hold in bf16: step 1, norm.weight, off "
        "(error 0.5, allowed 1e-10)"
    )
    # Infinity is no size of an error.
    assert second == "every gradient is right does not hold in bf16: step 2, head.weight"


def test_the_file_is_json_and_has_the_plan_that_ran(tmp_path: Path) -> None:
    one = proof(HOLDS, BROKEN)
    one.write(tmp_path / "proof.json")

    def refuse(number: str) -> None:
        raise AssertionError(f"JSON has no {number}")

    data = json.loads((tmp_path / "proof.json").read_text(), parse_constant=refuse)
    assert (data["schema"], data["proven"], data["subject"]) == (1, False, "module:build")
    ran = Plan.from_json(json.dumps(data["shrunk_plan"]))
    assert ran == one.shrunk_plan
    assert ran.content_hash() == data["shrunk_plan_hash"]
    right, wrong = data["passes"]
    assert (right["precision"], right["holds"], right["diagnosis"]) == ("fp64", True, None)
    claim = wrong["claims"][1]
    assert (claim["rule"], claim["holds"], claim["max_error"]) == ("prove-gradients", False, "inf")
    assert [failure["error"] for failure in claim["failures"]] == [0.5, "inf"]
    assert right["claims"][0]["max_error"] == 1e-12


def verdict(values: Values) -> SubjectProof:
    evidence = evidence_of(values)
    results = judge(evidence)
    told = diagnose(evidence, results)
    return SubjectProof(
        file="train.py",
        mesh="dp2",
        framework="torch",
        seed=0,
        num_steps=1,
        num_parameters=2,
        num_elements=8,
        versions={},
        passes=(ProofPass(precision="fp64", claims=results, diagnosis=told),),
    )


def test_a_proof_that_holds(tmp_path: Path) -> None:
    proof = verdict({})
    proof.require()
    proof.write(tmp_path / "proof.json")
    found = json.loads((tmp_path / "proof.json").read_text())
    assert (found["schema"], found["proven"], found["mesh"]) == (1, True, "dp2")
    assert found["passes"][0]["diagnosis"] is None


def test_one_that_does_not_says_what_is_wrong_first() -> None:
    proof = verdict({(rank, "gradients"): {"w": GRADIENT["w"] * 2} for rank in (0, 1)})
    with pytest.raises(ProofFailed, match=r"prove-gradients.*first wrong: w \(copies over dp\)"):
        proof.require()
    assert proof.diagnosis is not None
    assert proof.to_json()["proven"] is False
