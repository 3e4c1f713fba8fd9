# SPDX-License-Identifier: Apache-2.0
"""Ties between 8-bit numbers, decided as the ranks did, where a plan in float64 is off.

A product of 8-bit numbers has few digits, so that another number may lie in the very middle between
two 8-bit numbers. Which of them it becomes is then a matter of the order in which sums were added
up, and layouts differ in that. So where a comparison fails, the oracle is run again with one of its
ties, within 1e-10, rounded to the other side, one after the other; a tie with which the first
difference goes, or is less than half as large, stays so. What is compared in the end is as sharp as
ever: the plan must be what one device computes, with these ties decided so. A difference that no
tie explains stays.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.proof.claims.claims import ClaimResult, first_failure, judge
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.oracle.fp8 import Tie, TieNotes
from echelon.proof.oracle.oracle import OracleStep, run_oracle

MOST_TIES = 16
"""Ties that are decided at most, and four times as many are tried for each: a plan with more is
judged by what has been found."""

Claims = tuple[ClaimResult, ...]


def with_fp8_ties_of_ranks(evidence: PlanEvidence, results: Claims) -> tuple[PlanEvidence, Claims]:
    """Return the evidence of a plan in float64 with ties decided as its ranks did, and claims."""
    flipped: frozenset[Tie] = frozenset()
    for _ in range(MOST_TIES):
        failed = first_failure(results)
        if failed is None or failed[1].allowed == 0.0:
            break
        notes = TieNotes(flipped)
        _oracle(evidence, notes)
        # The last ones before the difference are the likeliest to have made it.
        near = [tie for tie in notes.found if tie[0] <= failed[1].step and tie not in flipped]
        for tie in near[: -4 * MOST_TIES - 1 : -1]:
            tried = replace(evidence, steps=_oracle(evidence, TieNotes(flipped | {tie})))
            judged = judge(tried)
            if _is_better(judged, results):
                evidence, results, flipped = tried, judged, flipped | {tie}
                break
        else:
            break
    return evidence, results


def _oracle(evidence: PlanEvidence, notes: TieNotes) -> tuple[OracleStep, ...]:
    forced = [
        {layer: (one.picked_BTK, one.kept_BTK) for layer, one in step.routed.items()}
        for step in evidence.steps
    ]
    return run_oracle(evidence.reference_plan, len(evidence.steps), forced=forced, ties=notes)


def _is_better(now: Claims, before: Claims) -> bool:
    """Return whether the first difference has gone, or is less than half as large."""
    first, other = first_failure(before), first_failure(now)
    assert first is not None, "something is off"
    if other is None:
        return True
    was, found = _place(before), _place(now)
    return found > was or (found == was and other[1].error < first[1].error / 2)


def _place(results: Claims) -> tuple[int, int, int]:
    """Return where the first difference is: its step, its claim, and its place in the model."""
    return min(
        (failure.step, order, failure.position)
        for order, result in enumerate(results)
        for failure in result.failures
    )
