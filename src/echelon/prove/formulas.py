"""What every optimizer shares, written out in plain arithmetic: rate, norm, clip, loss scale.

Written apart from the training engine on purpose: a proof that called the engine's own optimizer
would prove that it equals itself. The update rules themselves are in `prove/optimizers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from echelon.core.plan import Optimizer, Precision

Tensors = Mapping[str, torch.Tensor]

LARGEST_GROWN_SCALE = 2.0**100
"""A scale does not grow beyond it: gradients that let it are all zero."""


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of `step` (from 0; steps that an overflow skips count too).

    Warm-up gives the full rate in its last step; the fall would reach `final_ratio` in step
    `total_steps`, the first one that is not taken.
    """
    peak, low, end = optimizer.learning_rate, optimizer.final_ratio, optimizer.total_steps
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    wsd = optimizer.schedule == "wsd"
    start = end - optimizer.decay_steps if wsd else optimizer.warmup_steps
    if optimizer.schedule == "constant" or step < start:
        return peak
    share = min(1.0, (step - start) / max(1, end - start))
    if optimizer.schedule == "cosine":
        return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))
    return peak * (1 - share * (1 - low))


def global_norm(gradients: Tensors) -> float:
    """Return the L2 norm of all gradients together, summed in float64.

    It is infinite where the sum of squares overflows, so also where a gradient is: such a step is
    skipped where the loss is scaled.
    """
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Return what gradients of `norm` are multiplied by to be no longer than `clip_norm`."""
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm


@dataclass(slots=True)
class LossScale:
    """Follow the factor by which the loss is multiplied before backward.

    Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the counting of overflows
    before the first fall is that of Megatron-LM: once used up, every further overflow halves the
    scale until it grows again.
    """

    scale: float
    good: int
    left: int

    @classmethod
    def start(cls, precision: Precision) -> LossScale:
        """Return the scale of the first step; 1 where the loss is not scaled."""
        scale = 1.0 if precision.loss_scaling == "none" else precision.loss_scale
        return cls(scale, 0, precision.loss_scale_hysteresis)

    def follow(self, precision: Precision, *, overflow: bool) -> None:
        """Change the scale after a step."""
        if precision.loss_scaling != "dynamic":
            return
        if overflow:
            self.good, self.left = 0, self.left - 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, precision.loss_scale_min)
            return
        self.good += 1
        if self.good == precision.loss_scale_window:
            self.good, self.left = 0, precision.loss_scale_hysteresis
            self.scale = max(self.scale, min(2 * self.scale, LARGEST_GROWN_SCALE))
