"""The loss scale of a proof: overflow happens in known steps, or cannot happen.

A step that overflows must change nothing on any rank, and a dynamic scale must follow. Where a
float16 gradient overflows depends on rounding, so float16 is no place to prove it; float64 is. Its
squares overflow where the norm passes 2^512, which is as sharp as float64 itself: the first scale
is chosen such that the norms of the loud steps (`prove/batches.py`) pass it and those of the others
do not. Scaling by a number that is no power of two costs a rounding of 1e-16.

In the plan's own precision the scale starts so low that nothing can overflow, and is seen to grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from echelon.core.plan import Plan
from echelon.prove.batches import loud_steps
from echelon.prove.oracle import TORCH_DTYPES, OracleStep

_LARGEST_NORM = 2.0**512
"""The norm whose square is the first that float64 does not hold."""

_ROOM = 256.0


def num_steps_with_overflow(plan: Plan, num_steps: int) -> int:
    """Return how many steps a proof takes so that `num_steps` of them update the parameters."""
    return num_steps + len(loud_steps(plan))


def overflowing_scale(plan: Plan, unscaled: Sequence[OracleStep]) -> float:
    """Return the float64 scale with which the loud steps overflow, and no others.

    `unscaled` are the steps of the plan without scaling: the gradient norms that are to be scaled.
    """
    loud = min(step.grad_norm for step in unscaled if step.step in loud_steps(plan))
    other = max(step.grad_norm for step in unscaled if step.step not in loud_steps(plan))
    return _LARGEST_NORM / math.sqrt(loud * other)


def quiet_scale(plan: Plan, unscaled: Sequence[OracleStep]) -> float:
    """Return a power of two, the plan's scale or less, with which nothing overflows.

    Gradients inside the model may be larger than those of its weights, and the scale grows twice.
    """
    precision = plan.mathematics.precision
    names = (precision.parameters, precision.gradients, precision.reduction)
    limit = min(torch.finfo(TORCH_DTYPES[name]).max for name in names)
    largest = max(float(g.abs().max()) for step in unscaled for g in step.gradients.values())
    scale = min(precision.loss_scale, limit / (_ROOM * largest))
    return 2.0 ** math.floor(math.log2(scale))


def with_scale(plan: Plan, scale: float) -> Plan:
    """Return the plan with another first loss scale."""
    precision = plan.mathematics.precision
    changed = replace(
        precision, loss_scale=scale, loss_scale_min=min(precision.loss_scale_min, scale)
    )
    return replace(plan, mathematics=replace(plan.mathematics, precision=changed))


def without_scale(plan: Plan) -> Plan:
    """Return the plan with a loss that is not scaled, and the same batches."""
    precision = replace(plan.mathematics.precision, loss_scale=1.0, loss_scale_window=10**9)
    return replace(plan, mathematics=replace(plan.mathematics, precision=precision))
