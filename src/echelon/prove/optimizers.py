"""AdamW, SGD and Muon written out as in the papers, one whole tensor at a time.

An update is told in two parts, that of the gradients and that of the weight decay, for a mistake
is mostly in one of them. SGD couples its decay (it goes through the momentum); since the momentum
is linear, its two parts are kept apart there too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer
from echelon.cost.updates import decays, update_of

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The quintic of Jordan et al., "Muon", 2024: it takes singular values to about 1."""

_MUON_RATE = 0.2
_SMALLEST_NORM = 1e-7


@dataclass(slots=True)
class State:
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
class Update:
    """Hold the two parts of one update of one tensor; the update is their sum."""

    main: torch.Tensor
    decay: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """Return what the step adds to the tensor."""
        return self.main + self.decay

    @classmethod
    def none(cls, parameter: torch.Tensor) -> Update:
        """Return the update of a step that is skipped."""
        return cls(main=torch.zeros_like(parameter), decay=torch.zeros_like(parameter))


def update(
    spec: ParameterSpec,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    optimizer: Optimizer,
    rate: float,
) -> Update:
    """Return the update of a whole parameter by its clipped gradient, and advance `state`."""
    rule = {"adamw": adamw, "sgd": sgd, "muon": muon}[update_of(optimizer, spec)]
    decay = optimizer.weight_decay if decays(optimizer, spec) else 0.0
    result = rule(parameter, gradient, state, optimizer, rate=rate, decay=decay)
    state.num_updates += 1
    return result


def adamw(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    optimizer: Optimizer,
    *,
    rate: float,
    decay: float,
) -> Update:
    """Return AdamW's update.

    Loshchilov & Hutter, "Decoupled Weight Decay Regularization", algorithm 2: the decay is taken
    from the parameter before the step. Bias correction as in Kingma & Ba, "Adam", algorithm 1.
    """
    beta1, beta2, count = optimizer.beta1, optimizer.beta2, state.num_updates + 1
    first = state.advance("exp_avg", beta1, 1 - beta1, gradient)
    second = state.advance("exp_avg_sq", beta2, 1 - beta2, gradient * gradient)
    mean, square = first / (1 - beta1**count), second / (1 - beta2**count)
    return Update(
        main=-rate * mean / (square.sqrt() + optimizer.eps), decay=-rate * decay * parameter
    )


def sgd(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    optimizer: Optimizer,
    *,
    rate: float,
    decay: float,
) -> Update:
    """Return the update of SGD with momentum and L2 decay, as `torch.optim.SGD` writes it.

    Sutskever et al., "On the importance of initialization and momentum", 2013, without Nesterov's
    step and without dampening: m = momentum x m + (g + decay x p); p = p - rate x m.
    """
    main = state.advance("momentum", optimizer.momentum, 1.0, gradient)
    shrink = state.advance("momentum of decay", optimizer.momentum, decay, parameter)
    return Update(main=-rate * main, decay=-rate * shrink)


def muon(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    optimizer: Optimizer,
    *,
    rate: float,
    decay: float,
) -> Update:
    """Return Muon's update of a whole matrix.

    Jordan et al., "Muon", 2024: the gradient with Nesterov momentum, orthogonalised. Liu et al.,
    "Muon is Scalable for LLM Training", 2025, equation 4: scaled to AdamW's size, decay decoupled.
    """
    momentum = state.advance("momentum", optimizer.momentum, 1.0, gradient)
    looked_ahead = gradient + optimizer.momentum * momentum
    direction = newton_schulz(looked_ahead, optimizer.newton_schulz_steps)
    scale = rate * _MUON_RATE * max(parameter.shape) ** 0.5
    return Update(main=-scale * direction, decay=-rate * decay * parameter)


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
