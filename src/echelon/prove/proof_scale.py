"""The loss scale of a proof: overflow happens in one known step, or cannot happen.

A dynamic scale must be seen to grow after its window, to fall when a step overflows, and that step
must change nothing on any rank. Where a float16 gradient overflows depends on rounding, so float16
is no place to prove it; float64 is. Its squares overflow where the norm passes 2^512, which is as
sharp as float64 itself: the start scale is put below that by such a factor that the first scale
that has grown overflows and no other does. Scaling by a number that is no power of two costs a
rounding of 1e-16.

In the plan's own precision the scale starts so low that nothing can overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from echelon.core.plan import Plan
from echelon.prove.oracle import TORCH_DTYPES, OracleStep

_LARGEST_NORM = 2.0**512
"""The norm whose square is the first that float64 does not hold."""

_ROOM = 256.0


def num_steps_with_overflow(plan: Plan, num_steps: int) -> int:
    """Return how many steps a proof takes so that `num_steps` of them update the parameters."""
    precision = plan.mathematics.precision
    dynamic = precision.loss_scaling == "dynamic"
    return num_steps + (precision.loss_scale_hysteresis if dynamic else 0)


def overflowing_scale(plan: Plan, unscaled: Sequence[OracleStep]) -> float:
    """Return the float64 scale that overflows in the step after its first window, and there only.

    `unscaled` are the steps of the plan without scaling: the gradient norms that are to be scaled.
    """
    window = plan.mathematics.precision.loss_scale_window
    norms = [step.grad_norm for step in unscaled]
    before, at = max(norms[:window]), norms[window]
    return _LARGEST_NORM / math.sqrt(before * 2 * at)


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


def unscaled(plan: Plan) -> Plan:
    """Return the plan without loss scaling."""
    precision = replace(plan.mathematics.precision, loss_scaling="none")
    return replace(plan, mathematics=replace(plan.mathematics, precision=precision))
