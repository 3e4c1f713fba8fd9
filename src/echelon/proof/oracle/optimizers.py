# SPDX-License-Identifier: Apache-2.0
"""AdamW, SGD and Muon written out as in the papers; what they share: rate, norm, clip, loss scale.

Written apart from the training engine on purpose: a proof that called the engine's own optimizer
would prove that it equals itself.

An update is told in two parts, that of the gradients and that of the weight decay, for a mistake
is mostly in one of them. SGD couples its decay (it goes through the momentum); since the momentum
is linear, its two parts are kept apart there too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.registry import load_reference
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer, Precision
from echelon.layout.stage import decays, update_rule_of

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The quintic of Jordan et al., "Muon", 2024: it takes singular values to about 1."""

_MUON_RATE = 0.2  # of the rate, per root of a width
_SMALLEST_NORM = 1e-7  # of a matrix


@dataclass(slots=True)
class OptimizerState:
    """Hold what an optimizer remembers of one tensor: running sums by name, updates done."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    num_updates: int = 0

    def advance(self, name: str, keep: float, take: float, value: torch.Tensor) -> torch.Tensor:
        """Set the sum `name` (0 at first) to keep x itself + take x value; return it."""
        before = self.sums.get(name)
        now = take * value if before is None else keep * before + take * value
        self.sums[name] = now
        return now


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorUpdate:
    """Hold the two parts of one update of one tensor; the update is their sum."""

    main: torch.Tensor
    decay: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """Return what the step adds to the tensor."""
        return self.main + self.decay

    @classmethod
    def none(cls, parameter: torch.Tensor) -> TensorUpdate:
        """Return the update of a step that is skipped."""
        return cls(main=torch.zeros_like(parameter), decay=torch.zeros_like(parameter))


def update(
    spec: ParameterSpec,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: OptimizerState,
    optimizer: Optimizer,
    rate: float,
) -> TensorUpdate:
    """Return the update of a whole parameter by its clipped gradient, and advance `state`."""
    rule: Callable[..., TensorUpdate] = load_reference(
        OPTIMIZERS[update_rule_of(optimizer, spec)].oracle
    )
    decay = optimizer.weight_decay if decays(optimizer, spec) else 0.0
    result = rule(parameter, gradient, state, optimizer, rate=rate, decay=decay)
    state.num_updates += 1
    return result


def adamw(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: OptimizerState,
    optimizer: Optimizer,
    *,
    rate: float,
    decay: float,
) -> TensorUpdate:
    """Return AdamW's update.

    Loshchilov & Hutter, "Decoupled Weight Decay Regularization", algorithm 2: the decay is taken
    from the parameter before the step. Bias correction as in Kingma & Ba, "Adam", algorithm 1.
    """
    beta1, beta2, count = optimizer.beta1, optimizer.beta2, state.num_updates + 1
    first = state.advance("exp_avg", beta1, 1 - beta1, gradient)
    second = state.advance("exp_avg_sq", beta2, 1 - beta2, gradient * gradient)
    mean, square = first / (1 - beta1**count), second / (1 - beta2**count)
    return TensorUpdate(
        main=-rate * mean / (square.sqrt() + optimizer.eps), decay=-rate * decay * parameter
    )


def sgd(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: OptimizerState,
    optimizer: Optimizer,
    *,
    rate: float,
    decay: float,
) -> TensorUpdate:
    """Return the update of SGD with momentum and L2 decay, as `torch.optim.SGD` writes it.

    Sutskever et al., "On the importance of initialization and momentum", 2013, without Nesterov's
    step and without dampening: m = momentum x m + (g + decay x p); p = p - rate x m.
    """
    main = state.advance("momentum", optimizer.momentum, 1.0, gradient)
    shrink = state.advance("momentum of decay", optimizer.momentum, decay, parameter)
    return TensorUpdate(main=-rate * main, decay=-rate * shrink)


def muon(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: OptimizerState,
    optimizer: Optimizer,
    *,
    rate: float,
    decay: float,
) -> TensorUpdate:
    """Return Muon's update of a whole matrix.

    Jordan et al., "Muon", 2024: the gradient with Nesterov momentum, orthogonalised. Liu et al.,
    "Muon is Scalable for LLM Training", 2025, equation 4: scaled to AdamW's size, decay decoupled.
    """
    momentum = state.advance("momentum", optimizer.momentum, 1.0, gradient)
    looked_ahead = gradient + optimizer.momentum * momentum
    direction = newton_schulz(looked_ahead, optimizer.newton_schulz_steps)
    scale = rate * _MUON_RATE * max(parameter.shape) ** 0.5
    return TensorUpdate(main=-scale * direction, decay=-rate * decay * parameter)


def newton_schulz(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return `matrix` with singular values near 1, in its dtype, float32 at the least."""
    a, b, c = NEWTON_SCHULZ
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    x = matrix.to(dtype)
    x = x / (torch.linalg.norm(x) + _SMALLEST_NORM)
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    for _ in range(num_steps):
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    return (x.t() if tall else x).to(matrix.dtype)


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


def global_norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """Return the L2 norm of all gradients together, summed in float64.

    It is infinite where the sum of squares overflows, so also where a gradient is: such a step is
    skipped where the loss is scaled.
    """
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Return what gradients of `norm` are multiplied by to be no longer than `clip_norm`."""
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm


@dataclass(slots=True)
class OracleLossScale:
    """Follow the factor by which the loss is multiplied before backward.

    Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the counting of overflows
    before the first fall is that of Megatron-LM: once used up, every further overflow halves the
    scale until it grows again.
    """

    scale: float
    good: int
    left: int

    @classmethod
    def start(cls, precision: Precision) -> OracleLossScale:
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
