# SPDX-License-Identifier: Apache-2.0
"""SGD with momentum and coupled weight decay, fused: what `torch.optim.SGD` computes."""

from __future__ import annotations

import torch

from echelon.core.plan import Optimizer
from echelon.training.optimizer.trained_ranges import (
    UPDATES,
    FusedOperands,
    OnePassOperands,
    define_update,
    kernels_for,
    publish,
    scaled,
)


class MomentumSgd:
    """Update with torch's fused kernel: no dampening, no Nesterov step."""

    def __init__(self, settings: Optimizer) -> None:
        """Take the momentum of `settings`."""
        self._momentum = settings.momentum

    def start_update(self, count: int) -> None:
        """Ignore the number of the update: the momentum starts at zero."""

    def update(self, operands: FusedOperands) -> None:
        """Update the targets and the momentum in one call."""
        (momenta,) = operands.state
        fused_sgd(operands, momenta, self._momentum)

    def update_in_one_pass(self, operands: OnePassOperands) -> None:
        """Update a target and its momentum, and the parameters that are copies of it."""
        one, numbers = operands, [self._momentum, *operands.numbers]
        UPDATES.update_sgd(one.target, one.gradient, list(one.state), one.values, numbers)


def fused_sgd(operands: FusedOperands, momenta: list[torch.Tensor], momentum: float) -> None:
    """Subtract rate x (gradient + weight_decay x target), or the momentum of that if not zero."""
    if not operands.targets:
        return
    torch.ops.aten._fused_sgd_.default(
        operands.targets,
        operands.gradients,
        momenta if momentum else [],
        weight_decay=operands.weight_decay,
        momentum=momentum,
        lr=operands.rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _one_pass(
    target: torch.Tensor,
    gradient: torch.Tensor,
    state: list[torch.Tensor],
    values: torch.Tensor | None,
    numbers: list[float],
) -> None:
    kernels = kernels_for(target)
    if kernels is not None:
        kernels.sgd(target, gradient, state, values, numbers)
        return
    momentum, rate, factor, weight_decay = numbers
    operands = FusedOperands(
        targets=[target],
        gradients=[scaled(gradient, factor, target.dtype)],
        state=(),
        rate=rate,
        weight_decay=weight_decay,
    )
    fused_sgd(operands, state, momentum)
    publish(target, values)


define_update(
    "update_sgd(Tensor(a!) target, Tensor gradient, Tensor(b!)[] state, Tensor(c!)? values,"
    " float[] numbers) -> ()",
    _one_pass,
)
