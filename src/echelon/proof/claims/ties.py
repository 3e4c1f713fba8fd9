"""What ties between 8-bit numbers are worth, where a plan in float64 is off by more than is usual.

A product of 8-bit numbers has few digits, so that another number may lie in the very middle between
two 8-bit numbers, or at the limit of a scale. Which of them it becomes is then a matter of the
order in which sums were added up, and layouts differ in that. So where a comparison fails, the
oracle is run again twice, with all that is a tie but for 1e-10 rounded up, and down. How far these
runs are from the first is what ties are worth: nothing, where there are none. Of a plan, some of
whose ties fall to one side and some to the other, as much is allowed as of draws of rounding errors
(`tolerance.py`): 4 times the larger of both, or of the means over tensors that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.core.plan import Plan
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.claims.tolerance import FLOAT64_TOLERANCE, Tolerance, measured, run_errors
from echelon.proof.oracle.fp8 import Ties
from echelon.proof.oracle.oracle import OracleStep, run_oracle

SIDES: tuple[Ties, Ties] = ("up", "down")
"""Whither ties are rounded."""


def may_be_ties(plan: Plan, results: Sequence[ClaimResult]) -> bool:
    """Return whether something is off of a plan in which numbers are rounded to 8 bits."""
    failures = [check for result in results for check in result.failures]
    numbers = all(check.allowed > 0.0 for check in failures)
    return plan.mathematics.precision.is_fp8 and bool(failures) and numbers


def tie_tolerance(plan: Plan, oracle: Sequence[OracleStep]) -> Tolerance:
    """Return the tolerance of a float64 plan whose oracle took these steps."""
    forced = [
        {layer: (one.picked_BTK, one.kept_BTK) for layer, one in step.routed.items()}
        for step in oracle
    ]
    runs = [run_oracle(plan, len(oracle), forced=forced, ties=side) for side in SIDES]
    errors = [run_errors(plan, oracle, run, has_masters=False) for run in runs]
    return replace(measured(errors, FLOAT64_TOLERANCE, {}), own_precision=False)
