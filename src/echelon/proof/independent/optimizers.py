# SPDX-License-Identifier: Apache-2.0
"""Learning rate, clipping, loss scale and updates: by PyTorch's own optimizers where it has them.

AdamW and SGD are those of `torch.optim`. Muon's iteration is taken to the singular values
themselves: the quintic is odd, so it leaves the singular vectors as they are (Jordan et al.,
"Muon", 2024), and that of the whole matrix is U diag(p(p(...s))) V^T. Its size is that of Liu et
al., "Muon is Scalable for LLM Training", 2025, equation 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from echelon.core.errors import ConfigError
from echelon.core.plan import Optimizer, Precision
from echelon.core.rulebook.prove import PROVE_INDEPENDENT_OPTIMIZER
from echelon.proof.independent.weights import WeightFacts

KINDS = frozenset({"adamw", "sgd", "muon"})
"""The optimizers that there are formulas of."""

_LARGEST_SCALE = 2.0**100
"""A loss scale does not grow beyond it."""

Tensors = Mapping[str, torch.Tensor]


def require_formula(settings: Optimizer) -> None:
    """Raise ConfigError where the optimizer of a plan has no formula here."""
    if not has_formula(settings):
        raise ConfigError(
            PROVE_INDEPENDENT_OPTIMIZER.problem(
                f"optimizer.kind = {settings.kind!r} has no independent formula",
                key="optimizer.kind",
                suggestions=sorted(KINDS),
            )
        )


def has_formula(settings: Optimizer) -> bool:
    """Return whether the optimizer of a plan has a formula here."""
    return settings.kind in KINDS


def rate_of(settings: Optimizer, step: int) -> float:
    """Return the learning rate of a step, counted from 0.

    It rises in equal parts to its peak, which the last step of warm-up has, then is constant, falls
    in a line or as half a cosine from the end of warm-up to `final_ratio` of it at `total_steps`;
    "wsd" falls in a line in the last `decay_steps` only.
    """
    peak, final, end = settings.learning_rate, settings.final_ratio, settings.total_steps
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps * peak
    match settings.schedule:
        case "constant":
            return peak
        case "linear" | "cosine":
            begin = settings.warmup_steps
        case "wsd":
            begin = end - settings.decay_steps
    if step <= begin:
        return peak
    done = min(step - begin, end - begin) / (end - begin) if end > begin else 1.0
    left = (1 + math.cos(done * math.pi)) / 2 if settings.schedule == "cosine" else 1 - done
    return peak * final + (peak - peak * final) * left


def decays(settings: Optimizer, fact: WeightFacts) -> bool:
    """Return whether a weight decays: all do, or matrices, or the matrices of blocks.

    What is frozen does not.
    """
    if fact.frozen:
        return False
    match settings.decay:
        case "all":
            return True
        case "matrices":
            return fact.is_matrix
        case "blocks":
            return fact.is_matrix and fact.in_block


def norm_of(gradients: Tensors) -> float:
    """Return the length of all gradients as one vector; infinite where a square overflows."""
    return math.sqrt(sum(float((one * one).sum()) for one in gradients.values()))


def clip_factor(settings: Optimizer, norm: float) -> float:
    """Return what gradients are multiplied by so that their length is at most `clip_norm`."""
    if settings.clip_norm is None:
        return 1.0
    return min(1.0, settings.clip_norm / norm) if norm else 1.0


@dataclass(slots=True)
class ScaleOfLoss:
    """Follow a loss scale: doubled after a window of good steps, halved after overflows."""

    settings: Precision
    scale: float
    good_steps: int = 0
    overflows: int = 0

    @classmethod
    def first(cls, settings: Precision) -> ScaleOfLoss:
        """Return that of the first step."""
        return cls(settings, 1.0 if settings.loss_scaling == "none" else settings.loss_scale)

    def after(self, *, overflow: bool) -> None:
        """Follow a step. Overflows are forgiven up to the hysteresis, until the scale grows."""
        settings = self.settings
        if settings.loss_scaling != "dynamic":
            return
        if overflow:
            self.good_steps, self.overflows = 0, self.overflows + 1
            if self.overflows >= settings.loss_scale_hysteresis:
                self.scale = max(self.scale / 2, settings.loss_scale_min)
            return
        self.good_steps += 1
        if self.good_steps == settings.loss_scale_window:
            self.good_steps, self.overflows = 0, 0
            if self.scale < _LARGEST_SCALE:
                self.scale = min(2 * self.scale, _LARGEST_SCALE)


class _TorchState:
    """Hold what PyTorch's functions of SGD and AdamW keep of one weight.

    The functions, as making a `torch.optim.Optimizer` imports PyTorch's compiler: seconds.
    """

    def __init__(self, value: torch.Tensor) -> None:
        """Begin as a new optimizer does."""
        self._value = value
        self._momentum: list[torch.Tensor | None] = [None]
        self._average, self._square = torch.zeros_like(value), torch.zeros_like(value)
        self._count = torch.zeros(())

    def sgd(self, gradient: torch.Tensor, settings: Optimizer, rate: float, decay: float) -> None:
        """Update the weight in place."""
        sgd(
            [self._value],
            [gradient],
            self._momentum,
            foreach=False,
            weight_decay=decay,
            momentum=settings.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def adamw(self, gradient: torch.Tensor, settings: Optimizer, rate: float, decay: float) -> None:
        """Update the weight in place."""
        adamw(
            [self._value],
            [gradient],
            [self._average],
            [self._square],
            [],
            [self._count],
            foreach=False,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=rate,
            weight_decay=decay,
            eps=settings.eps,
            maximize=False,
        )


class UpdateRules:
    """Hold the weights under training, each with the optimizer that updates it."""

    def __init__(
        self, settings: Optimizer, facts: Mapping[str, WeightFacts], values: Tensors
    ) -> None:
        """Take the first values, and nothing of earlier steps."""
        self.values = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        self._settings, self._momentum = settings, dict[str, torch.Tensor]()
        self.trained = [name for name in self.values if not facts[name].frozen]
        is_muon = settings.kind == "muon"
        matrices = {name for name, f in facts.items() if is_muon and f.is_matrix and f.in_block}
        self._decays = {name: self._decay(facts[name]) for name in self.values}
        self._of_muon = {name for name in self.trained if name in matrices}
        self._of_torch = {
            name: _TorchState(self.values[name]) for name in self.trained if name not in matrices
        }

    @torch.no_grad()
    def begin_with(self, values: Tensors) -> None:
        """Take these weights where there are such; what is kept of earlier gradients stays."""
        for name, value in self.values.items():
            if name in values and values[name].shape == value.shape:
                value.copy_(values[name])

    @torch.no_grad()
    def step(self, gradients: Tensors, rate: float) -> None:
        """Update every weight by its clipped gradient."""
        for name, state in self._of_torch.items():
            update = state.sgd if self._settings.kind == "sgd" else state.adamw
            update(gradients[name], self._settings, rate, self._decays[name])
        for name in self._of_muon:
            self.values[name].mul_(1 - rate * self._decays[name])
            direction = self._direction(name, gradients[name])
            size = 0.2 * math.sqrt(max(direction.shape))
            self.values[name].sub_(rate * size * direction)

    def _decay(self, fact: WeightFacts) -> float:
        return self._settings.weight_decay if decays(self._settings, fact) else 0.0

    def _direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the matrix that Muon moves along: of singular values near 1."""
        mu, before = self._settings.momentum, self._momentum.get(name)
        self._momentum[name] = gradient if before is None else mu * before + gradient
        nesterov = gradient + mu * self._momentum[name]
        u, values, vt = torch.linalg.svd(nesterov, full_matrices=False)
        values = values / (torch.sqrt((values * values).sum()) + 1e-7)
        for _ in range(self._settings.newton_schulz_steps):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        return u @ torch.diag(values) @ vt
