# SPDX-License-Identifier: Apache-2.0
"""Updates of each element by itself, by torch's fused kernels: AdamW, and SGD with momentum.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. SGD is that of
`torch.optim.SGD`: momentum and coupled weight decay, no dampening, no Nesterov step.
"""

from __future__ import annotations

import torch

from echelon.core.plan import Optimizer
from echelon.parallel.kernels.operators import define_operator
from echelon.training.optimizer.trained_ranges import (
    UPDATES,
    FusedOperands,
    OnePassOperands,
    kernels_for,
    publish,
    scaled,
)


class AdamW:
    """AdamW with torch's fused kernel, on the CPU or on a GPU."""

    def __init__(self, settings: Optimizer) -> None:
        self._settings = settings
        self._counts: dict[torch.device, torch.Tensor] = {}
        self._count = 0

    def start_update(self, count: int) -> None:
        """Say that the update to come is number `count` of all, from 1: for the bias correction."""
        self._count = count
        for tensor in self._counts.values():
            tensor.fill_(float(count))

    def update(self, operands: FusedOperands) -> None:
        """Update the targets and both moments in one call."""
        means, squares = operands.state
        device = operands.targets[0].device
        if device not in self._counts:
            self._counts[device] = torch.tensor(float(self._count), device=device)
        torch.ops.aten._fused_adamw_.default(
            operands.targets,
            operands.gradients,
            means,
            squares,
            [],
            [self._counts[device]] * len(means),
            lr=operands.rate,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            weight_decay=operands.weight_decay,
            eps=self._settings.eps,
            amsgrad=False,
            maximize=False,
        )

    def update_in_one_pass(self, operands: OnePassOperands) -> None:
        """Update a target and both moments, and the parameters that are copies of it."""
        one, settings = operands, self._settings
        numbers = [settings.beta1, settings.beta2, settings.eps, *one.numbers]
        UPDATES.update_adamw(
            one.target, one.gradient, list(one.state), one.values, numbers, self._count
        )


def _adamw_in_one_pass(
    target: torch.Tensor,
    gradient: torch.Tensor,
    state: list[torch.Tensor],
    values: torch.Tensor | None,
    numbers: list[float],
    count: int,
) -> None:
    kernels = kernels_for(target)
    if kernels is not None:
        kernels.adamw(target, gradient, state, values, numbers, count)
        return
    beta1, beta2, eps, *rates = numbers
    rule = AdamW(Optimizer(beta1=beta1, beta2=beta2, eps=eps))
    rule.start_update(count)
    rule.update(_operands(target, gradient, state, rates))
    publish(target, values)


define_operator(
    "update_adamw(Tensor(a!) target, Tensor gradient, Tensor(b!)[] state, Tensor(c!)? values,"
    " float[] numbers, int count) -> ()",
    cpu=_adamw_in_one_pass,
)


class MomentumSgd:
    """SGD with torch's fused kernel: no dampening, no Nesterov step."""

    def __init__(self, settings: Optimizer) -> None:
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


def _sgd_in_one_pass(
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
    momentum, *rates = numbers
    MomentumSgd(Optimizer(momentum=momentum)).update(_operands(target, gradient, state, rates))
    publish(target, values)


def _operands(
    target: torch.Tensor, gradient: torch.Tensor, state: list[torch.Tensor], rates: list[float]
) -> FusedOperands:
    """Operands of a fused update of one target; `rates` are rate, factor and weight decay."""
    rate, factor, weight_decay = rates
    return FusedOperands(
        targets=[target],
        gradients=[scaled(gradient, factor, target.dtype)],
        state=[[one] for one in state],
        rate=rate,
        weight_decay=weight_decay,
    )


define_operator(
    "update_sgd(Tensor(a!) target, Tensor gradient, Tensor(b!)[] state, Tensor(c!)? values,"
    " float[] numbers) -> ()",
    cpu=_sgd_in_one_pass,
)
