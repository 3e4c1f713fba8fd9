"""The verdict as JSON, as a file, and as an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.core.errors import ProofFailed
from echelon.proof.claims.proof import ProofPass
from echelon.proof.verify.claims import judge_subject
from echelon.proof.verify.explain import explain_subject
from echelon.proof.verify.verdict import SubjectProof
from tests.proof.verify.captures import GRADIENT, Values, evidence_of


def verdict(values: Values) -> SubjectProof:
    evidence = evidence_of(values)
    results = judge_subject(evidence)
    told = explain_subject(evidence, results)
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
