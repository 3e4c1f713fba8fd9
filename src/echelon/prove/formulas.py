"""The optimizer written out as in the papers, one tensor at a time, in plain arithmetic.

Written apart from the training engine on purpose: a proof that called the engine's own optimizer
would prove that it equals itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from echelon.core.plan import Optimizer

Tensors = Mapping[str, torch.Tensor]


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of `step` (from 0).

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
    """Return the L2 norm of all gradients together, summed in float64."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Return what gradients of `norm` are multiplied by to be no longer than `clip_norm`."""
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm


@dataclass(slots=True)
class Moments:
    """Hold AdamW's two running means of one tensor."""

    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Hold the two parts of one AdamW update of one tensor; the update is their sum."""

    adam: torch.Tensor
    decay: torch.Tensor


def adamw(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: Moments,
    optimizer: Optimizer,
    step: int,
) -> Update:
    """Return the update of step `step` (from 0) and advance `moments`.

    Loshchilov & Hutter, "Decoupled Weight Decay Regularization", algorithm 2: the decay is taken
    from the parameter before the step. Bias correction as in Kingma & Ba, "Adam", algorithm 1.
    """
    rate, beta1, beta2 = learning_rate(optimizer, step), optimizer.beta1, optimizer.beta2
    moments.first = beta1 * moments.first + (1 - beta1) * gradient
    moments.second = beta2 * moments.second + (1 - beta2) * gradient * gradient
    mean = moments.first / (1 - beta1 ** (step + 1))
    square = moments.second / (1 - beta2 ** (step + 1))
    decay = optimizer.weight_decay if parameter.dim() > 1 else 0.0
    return Update(
        adam=-rate * mean / (square.sqrt() + optimizer.eps),
        decay=-rate * decay * parameter,
    )
