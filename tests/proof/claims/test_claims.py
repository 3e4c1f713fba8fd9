"""Claims are judged by their comparisons; the failure that is told first is the cause."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import pytest

from echelon.core.rulebook import prove as rules
from echelon.proof.claims import taken, value_checks
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import CLAIMS, ClaimResult, ProofClaim, first_failure, judge
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

NONE = cast("PlanEvidence", None)


def check(error: float, allowed: float, *, step: int = 0, position: int = 0) -> Check:
    return Check(
        step=step,
        subject=f"{error} of {allowed}",
        error=error,
        allowed=allowed,
        position=position,
    )


def judged(*checks: Check) -> ClaimResult:
    def found(_: PlanEvidence) -> Iterator[Check]:
        yield from checks

    claim = ProofClaim(
        rules.PROVE_LOSS, "all is well", found, type(None), note=lambda _, checks: "noted"
    )
    result = claim.judge(NONE)
    assert result is not None
    return result


def test_the_worst_is_the_largest_share_of_what_is_allowed() -> None:
    result = judged(check(1e-3, 1.0), check(1e-12, 1e-10), check(0.0, 0.0))
    assert (result.worst, result.max_error, result.allowed) == ("1e-12 of 1e-10", 1e-12, 1e-10)
    assert (result.holds, result.compared, result.note) == (True, 3, "noted")
    claim = ProofClaim(rules.PROVE_LOSS, "nothing is said", lambda _: iter(()), type(None))
    assert claim.judge(NONE) is None


@pytest.mark.parametrize("error", [math.nan, math.inf, 5e-324])
def test_what_is_no_number_or_not_exact_fails(error: float) -> None:
    result = judged(check(0.5, 1.0), check(error, 0.0))
    assert not result.holds
    assert result.worst == f"{error} of 0.0"


def test_failures_come_by_step_then_by_place() -> None:
    late, second, first = (
        check(2, 1, step=1, position=-9),
        check(3, 1, position=1),
        check(4, 1, position=0),
    )
    result = judged(late, second, first, check(0, 1))
    assert result.failures == (first, second, late)
    other = judged(check(5, 1, step=0, position=7))
    # In the same step the claim that is listed first is the cause, wherever the other one is.
    assert first_failure([other, result]) == (other, other.failures[0])
    assert first_failure([judged(late), other]) == (other, other.failures[0])
    assert first_failure([judged(check(0, 1))]) is None


def test_a_right_run_is_judged_by_what_it_says() -> None:
    results = judge(replicas(shrink(layout(dp=2), precision="fp64"), 2))
    assert [result.rule.id for result in results if not result.holds] == []
    by_rule = {result.rule.id: result for result in results}
    assert len(by_rule) == len(results)
    assert by_rule["prove-gradients"].compared > 20
    # Nothing is said of bytes, orders or experts, and nothing need be.
    silent = {claim.rule.id for claim in CLAIMS} - by_rule.keys()
    assert {"prove-bytes-sent", "prove-schedule-order", "prove-routes"} <= silent
    assert not silent & {
        "prove-nothing-dropped",
        "prove-initial-weights",
        "prove-token-count",
        "prove-microbatch-loss",
        "prove-loss",
        "prove-gradients",
        "prove-gradient-norm",
        "prove-clipped-update",
        "prove-parameters",
        "prove-replicas",
    }


def test_evidence_has_the_claims_that_it_can_decide() -> None:
    of_plans = {claim.rule.id for claim in CLAIMS if issubclass(PlanEvidence, claim.needs)}
    captured = {claim.rule.id for claim in CLAIMS if issubclass(CapturedEvidence, claim.needs)}
    assert "prove-bytes-sent" in of_plans - captured
    assert "verify-optimizer-state" in captured - of_plans
    shared = {claim.rule.id: claim.checks for claim in CLAIMS if claim.rule.id in captured}
    assert shared["prove-gradients"] is taken.gradients
    assert shared["prove-clipped-update"] is value_checks.updates
    assert captured >= {"prove-awaited", "prove-in-flight"}
