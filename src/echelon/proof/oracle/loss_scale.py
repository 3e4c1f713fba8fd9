# SPDX-License-Identifier: Apache-2.0
"""The loss scale of a proof: overflow happens in known steps, or cannot happen.

A step that overflows must change nothing on any rank, and a dynamic scale must follow. Where a
float16 gradient overflows depends on rounding, so float16 is no place to prove it; float64 is. Its
squares overflow where the norm passes 2^512, which is as sharp as float64 itself: the first scale
is chosen such that the norms of the loud steps (`proof/oracle/batches.py`) pass it and those of
the others do not. Scaling by a number that is no power of two costs a rounding of 1e-16.

In the plan's own precision the batches are those of any proof, and the scale starts so low that
nothing can overflow; it is seen to grow.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from echelon.core.plan import Plan
from echelon.proof.oracle.batches import OVERFLOWING_SCALE, overflow_steps
from echelon.proof.oracle.oracle import TORCH_DTYPES, run_oracle

_LARGEST_NORM = 2.0**512
"""The norm whose square is the first that float64 does not hold."""

_LOUDER = 1.4
"""By how much the norm of a loud step is too large: of two ranks that hold parts of a gradient one
overflows by itself and the other does not, unless both parts are as large within 2 %."""

_ROOM = 256.0  # times the largest gradient


def with_overflow_scale(plan: Plan, num_steps: int) -> Plan:
    """Return the float64 plan with the scale under which the loud steps overflow, and no others."""
    # A scale that is large enough to make steps loud, and too small to overflow in them.
    loud_plan = with_scale(plan, OVERFLOWING_SCALE)
    steps = run_oracle(loud_plan, num_steps)
    loud = min(step.grad_norm for step in steps if step.step in overflow_steps(loud_plan))
    other = max(step.grad_norm for step in steps if step.step not in overflow_steps(loud_plan))
    return with_scale(plan, _LARGEST_NORM / loud * min(_LOUDER, math.sqrt(loud / other)))


def scale_without_overflow(plan: Plan, exact: Plan, num_steps: int) -> float:
    """Return a power of two, the plan's scale or less, with which nothing overflows.

    `exact` is the plan in float64. Gradients inside the model may be larger than those of its
    weights, and the scale grows twice.
    """
    precision = plan.mathematics.precision
    names = (precision.parameters, precision.gradients, precision.reduction)
    limit = min(torch.finfo(TORCH_DTYPES[name]).max for name in names)
    steps = run_oracle(with_scale(exact, 1.0), num_steps)
    largest = max(float(g.abs().max()) for step in steps for g in step.gradients.values())
    scale = min(precision.loss_scale, limit / (_ROOM * largest))
    return 2.0 ** math.floor(math.log2(scale))


def with_scale(plan: Plan, scale: float) -> Plan:
    """Return the plan with another first loss scale."""
    precision = plan.mathematics.precision
    changed = replace(
        precision, loss_scale=scale, loss_scale_min=min(precision.loss_scale_min, scale)
    )
    return replace(plan, mathematics=replace(plan.mathematics, precision=changed))
