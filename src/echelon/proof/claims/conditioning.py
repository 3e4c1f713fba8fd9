# SPDX-License-Identifier: Apache-2.0
"""What a rounding is worth in float64, where a plan is off by more than is usual.

A narrow model of many blocks that an optimizer moves far in each step may enlarge an error a
millionfold: a right plan, whose sums are added in another order, is then more than 1e-10 off. Where
a comparison fails by so little, the oracle is run again from initial weights that are moved by one
unit in their last place, up, down or not at all, by chance, and sends each token to the experts of
the first run. How far its losses, gradients and weights are from those of the first run is what a
rounding is worth to this model: a condition number, measured (Higham, "Accuracy and Stability of
Numerical Algorithms", 2002, section 1.6). Of a plan as much is allowed as of draws of rounding
errors (`tolerance.py`): 4 times the largest of eight draws, or of the means over tensors that are
alike.

Whatever is off by more than MOST_OF_ROUNDING is no rounding, however ill-conditioned the model is:
a plan with such an error is judged by the fixed tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from echelon.core.plan import Plan
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.claims.tolerance import run_errors
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE, Tolerance, measured
from echelon.proof.oracle.oracle import OracleStep, initial_parameters, run_oracle

MOST_OF_ROUNDING = 1e-6
"""The largest relative error in float64 that may be rounding: the root of its unit, and more."""
_DRAWS = 8  # runs


def may_be_rounding(results: Sequence[ClaimResult]) -> bool:
    """Return whether something is off, and everything by so little that it may be rounding."""
    failures = [check for result in results for check in result.failures]
    return bool(failures) and all(
        check.allowed > 0.0 and check.error <= MOST_OF_ROUNDING for check in failures
    )


def conditioned_tolerance(plan: Plan, oracle: Sequence[OracleStep]) -> Tolerance:
    """Return the tolerance of a float64 plan whose oracle took these steps."""
    forced = [
        {layer: (one.picked_BTK, one.kept_BTK) for layer, one in step.routed.items()}
        for step in oracle
    ]
    runs = [
        run_oracle(plan, len(oracle), forced=forced, initial=_moved(plan, draw))
        for draw in range(_DRAWS)
    ]
    errors = [run_errors(plan, oracle, run, has_masters=False) for run in runs]
    return replace(measured(errors, FLOAT64_TOLERANCE, {}), own_precision=False)


def _moved(plan: Plan, draw: int) -> dict[str, torch.Tensor]:
    """Return the initial values, each of them at random its neighbour or itself, in float64."""
    generator = torch.Generator().manual_seed(draw)
    unit = torch.finfo(torch.float64).eps
    moved: dict[str, torch.Tensor] = {}
    for name, value in initial_parameters(plan).items():
        places = torch.randint(-1, 2, value.shape, generator=generator, dtype=torch.float64)
        moved[name] = value.double() * (1.0 + unit * places)
    return moved
