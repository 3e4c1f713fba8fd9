# SPDX-License-Identifier: Apache-2.0
"""From the first thing that is wrong to a name for it: tensor, place, factor, axis."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.proof.causes.captured import first_cause_of_program
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.causes.plans import first_cause_of_plan
from echelon.proof.claims.claims import ClaimResult, first_failure
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.evidence import CapturedEvidence


def diagnose(
    evidence: PlanEvidence | CapturedEvidence, results: Sequence[ClaimResult]
) -> Diagnosis | None:
    """Return what the first failure in the order of causes is; None where all claims hold."""
    first = first_failure(results)
    if first is None:
        return None
    if isinstance(evidence, PlanEvidence):
        return first_cause_of_plan(evidence, results, *first)
    return first_cause_of_program(evidence, results, *first)
