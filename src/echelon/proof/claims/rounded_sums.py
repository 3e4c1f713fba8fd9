# SPDX-License-Identifier: Apache-2.0
"""The claims of a run whose sums are rounded: each within its bound, and the bytes of two hops.

The bound is that of `proof/sum_bounds.py`, which compared the sums on the ranks as they were made.
"""

from __future__ import annotations

import math
from dataclasses import replace

from echelon.core.rulebook import prove as rules
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.claims.late_checks import same_bits
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.predictions import bytes_sent
from echelon.proof.observed import ObservedRun
from echelon.proof.sum_bounds import NUM_STEPS, SumNote

WITHIN_BOUNDS = "rounded sums are off by no more than half a step of each rounding"
SAME_BITS = "late completion changes no bit where sums are rounded"
BYTES_OF_HOPS = "bytes sent equal the formulas where sums are rounded"


def judge_sums(evidence: PlanEvidence, observed: ObservedRun) -> tuple[ClaimResult, ...]:
    """Return whether rounded sums keep to their bounds, and to their bytes in the first step.

    `evidence` is that of exact sums: both runs begin with the same parameters. With late completion
    the rounded sums, too, must be the same bit for bit.
    """
    kind = observed.plan.layout.zero.reduce
    checks = [_check(note, kind, position) for position, note in enumerate(observed.sums)]
    first = replace(evidence, plan=observed.plan, steps=evidence.steps[:1], run=observed, late=None)
    return (
        judged(rules.PROVE_QUANTISED_SUMS, WITHIN_BOUNDS, checks),
        judged(rules.PROVE_BYTES_SENT, BYTES_OF_HOPS, list(bytes_sent(first))),
        *_late_bits(evidence, observed),
    )


def _late_bits(evidence: PlanEvidence, observed: ObservedRun) -> tuple[ClaimResult, ...]:
    """Return whether the run with late completion had the same bits, where there was one."""
    late = evidence.late
    if late is None or late.rounded is None:
        return ()
    both = replace(
        evidence,
        plan=observed.plan,
        steps=evidence.steps[:NUM_STEPS],
        run=observed,
        late=replace(late, observed=late.rounded),
    )
    return (judged(rules.PROVE_LATE, SAME_BITS, list(same_bits(both))),)


def _check(note: SumNote, kind: str, position: int) -> Check:
    """Compare one tensor of a rank's slice: the error is its share of the bound."""
    return Check(
        note.step,
        note.name,
        note.error / note.bound if note.bound else math.inf if note.error else 0.0,
        allowed=1.0,
        detail=f"a sum is off by {note.error:.3g}, where rounding to {kind} makes it off by "
        f"{note.bound:.3g} at most",
        position=position,
    )
