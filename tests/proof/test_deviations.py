"""Deviations of a proof: the worst claim about each kind of tensor, and what is allowed of it."""

from __future__ import annotations

from dataclasses import replace

from echelon.config.load import load_job
from echelon.core.rulebook import prove as rules
from echelon.core.rules import Rule
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.deviations import StrategyDeviation, all_hold, deviation_of
from echelon.proof.verdict import Proof, ProofPass


def _claim(rule: Rule, error: float, *, worst: str) -> ClaimResult:
    failures = () if error <= 1e-10 else (Check(0, worst, error),)
    return ClaimResult(
        rule=rule,
        statement="",
        failures=failures,
        compared=1,
        max_error=error,
        allowed=1e-10,
        worst=worst,
    )


def test_the_worst_claim_about_a_tensor_is_told() -> None:
    plan = load_job("nano", ["mesh.tp=2"]).plan
    claims = (
        _claim(rules.PROVE_MICROBATCH_LOSS, 2e-15, worst="microbatch 3"),
        _claim(rules.PROVE_LOSS, 1e-15, worst="loss"),
        _claim(rules.PROVE_GRADIENTS, 0.5, worst="head.weight"),
        _claim(rules.PROVE_PARAMETERS, 1e-12, worst="norm"),
        _claim(rules.PROVE_TOKEN_COUNT, 7.0, worst="tokens"),
    )
    proof = Proof(
        plan="nano",
        plan_hash="",
        mesh="tp2",
        shrunk_plan=plan,
        changes=(),
        subject="",
        seed=0,
        num_steps=1,
        versions={},
        passes=(ProofPass(precision="fp64", claims=claims, diagnosis=None),),
    )
    found = deviation_of("tp", "columns", plan, lambda _: proof)
    assert found.deviations is not None
    told = {name: (one.error, one.worst) for name, one in found.deviations["fp64"].items()}
    assert told == {
        "loss": (2e-15, "microbatch 3"),
        "gradient": (0.5, "head.weight"),
        "parameter": (1e-12, "norm"),
    }
    assert not found.holds
    assert not all_hold([found])


def test_what_was_refused_proves_nothing() -> None:
    refused = StrategyDeviation(strategy="ep", about="experts", refused=("no-effect",))
    held = StrategyDeviation(strategy="tp", about="columns", holds=True)
    assert not all_hold([refused])
    assert all_hold([refused, held])
    assert not all_hold([held, replace(held, holds=False)])
