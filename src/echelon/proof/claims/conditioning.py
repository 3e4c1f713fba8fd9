# SPDX-License-Identifier: Apache-2.0
"""What a rounding is worth, where a plan is off by more than is usual.

A narrow model of many blocks that an optimizer moves far in each step may enlarge an error a
millionfold: a right plan, whose sums are added in another order, is then more than 1e-10 off. In
float32 one token whose norm is tiny does so, too; and the draws of `tolerance.py`, whose forward
passes are the same, do not show it. Where a comparison fails by so little, the oracle is run again
from initial weights that are moved by one unit in their last place, up, down or not at all, by
chance, and sends each token to the experts of the first run. The errors of its losses, gradients
and weights are the worth of a rounding to this model: a condition number, measured (Higham,
"Accuracy and Stability of Numerical Algorithms", 2002, section 1.6). Of a plan as much is allowed
as of draws of rounding errors (`tolerance.py`): 4 times the largest of eight draws, or of the means
over tensors that are alike.

An error above MOST_OF_ROUNDING is no rounding, however ill-conditioned the model is: a plan with
such an error is judged by the first tolerance. So is a precision of few digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from echelon.core.plan import DType, Plan
from echelon.proof.claims.claims import ClaimResult, judge
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.tolerance import own_tolerance, roundoff, run_errors, unit_roundoff
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE, Tolerance, measured
from echelon.proof.oracle.operations import ForcedRouting
from echelon.proof.oracle.oracle import OracleStep, initial_parameters

MOST_OF_ROUNDING: Mapping[DType, float] = {"fp64": 1e-6, "fp32": 1e-4}
"""The largest relative error that may be rounding, by the dtype of all of a plan: in float64 the
root of its unit, and more; in float32 less than the root, and than one rounding to bfloat16."""
_DRAWS = 8  # runs

MovedRun = Callable[[Mapping[str, torch.Tensor], Sequence[ForcedRouting]], Sequence[OracleStep]]
"""From initial values and routes to the steps of the oracle."""


def judge_conditioned(
    evidence: PlanEvidence, run_from: MovedRun
) -> tuple[PlanEvidence, tuple[ClaimResult, ...]]:
    """Judge a plan; again by what a rounding is worth to its model, where that may be all.

    `run_from` runs the oracle of the plan, in its precision, from other initial values.
    """
    results = judge(evidence)
    if may_be_rounding(evidence.plan, results):
        tolerance = conditioned_tolerance(
            evidence.plan,
            evidence.steps,
            run_from,
            rounded=evidence.rounded,
            has_masters=evidence.run.has_masters,
        )
        evidence = replace(evidence, tolerance=tolerance)
        results = judge(evidence)
    return evidence, results


def may_be_rounding(plan: Plan, results: Sequence[ClaimResult]) -> bool:
    """Return whether something is off, and everything by so little that it may be rounding."""
    precision = plan.mathematics.precision
    most = MOST_OF_ROUNDING.get(precision.parameters, 0.0)
    # In float64 the 8 bits of both sides are alike; a weight that is moved has others.
    coded = precision.is_fp8 or precision.int8_block or plan.layout.zero.gather == "fp8"
    if roundoff(plan) > unit_roundoff("fp32") or (coded and precision.parameters != "fp64"):
        return False
    failures = [check for result in results for check in result.failures]
    return bool(failures) and all(check.allowed > 0.0 and check.error <= most for check in failures)


def conditioned_tolerance(
    plan: Plan,
    oracle: Sequence[OracleStep],
    run_from: MovedRun,
    *,
    rounded: Sequence[Sequence[OracleStep]] = (),
    has_masters: bool = False,
) -> Tolerance:
    """Return the tolerance of a plan whose float64 oracle took these steps.

    `rounded` are runs in the plan's precision, none in float64.
    """
    forced = [
        {layer: (one.picked_BTK, one.kept_BTK) for layer, one in step.routed.items()}
        for step in oracle
    ]
    runs = [run_from(_moved(plan, draw), forced) for draw in range(_DRAWS)]
    if rounded:
        return own_tolerance(plan, oracle, [*rounded, *runs], has_masters=has_masters)
    errors = [run_errors(plan, oracle, run, has_masters=False) for run in runs]
    return replace(measured(errors, FLOAT64_TOLERANCE, {}), own_precision=False)


def _moved(plan: Plan, draw: int) -> dict[str, torch.Tensor]:
    """Return the initial values, each of them at random its neighbour or itself, in float64."""
    generator = torch.Generator().manual_seed(draw)
    unit = 2 * unit_roundoff(plan.mathematics.precision.parameters)
    moved: dict[str, torch.Tensor] = {}
    for name, value in initial_parameters(plan).items():
        places = torch.randint(-1, 2, value.shape, generator=generator, dtype=torch.float64)
        moved[name] = value.double() * (1.0 + unit * places)
    return moved
