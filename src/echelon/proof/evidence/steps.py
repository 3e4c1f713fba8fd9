# SPDX-License-Identifier: Apache-2.0
"""A training step on one device, what passes between its modules, and what its loss is of.

Shape suffixes: n tokens, V classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional as fn

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """Hold all that one device did in a step; tensors by name."""

    step: int
    """The optimizer step, from 0."""
    loss: float
    """Loss of the whole batch."""
    grad_norm: float
    """Norm of the whole gradient, before clipping."""
    clip_norm: float | None = None
    """The norm that gradients are clipped to."""
    clip_scale: float
    """What clipping multiplies gradients by."""
    gradients: Tensors
    """Gradients of the loss before clipping."""
    before: Tensors
    """The values that the optimizer keeps (master copies, where there are any), before the step."""
    after: Tensors
    """The same after the step."""
    skipped: bool = False
    """Whether gradients overflowed, so that nothing changed."""
    state: Mapping[str, Tensors] = field(default_factory=dict[str, Tensors])
    """What the optimizer keeps, by key and parameter."""
    rates: Mapping[str, tuple[float, float]] = field(
        default_factory=dict[str, "tuple[float, float]"]
    )
    """Learning rate and weight decay of each parameter."""
    parts: Sequence[tuple[int, Tensors]] = ()
    """Tokens, and gradient of the sum of token losses, of each part of the batch."""
    part_losses: Sequence[tuple[int, float]] = ()
    """Tokens, and the sum of token losses, of each."""

    def clipped(self, name: str) -> torch.Tensor:
        """Return a gradient as the optimizer takes it."""
        return self.gradients[name] * self.clip_scale

    def update(self, name: str) -> torch.Tensor:
        """Return what the step added to a value, float64."""
        return self.after[name].double() - self.before[name].double()

    def parts_of_update(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What gradients and weight decay added to a value, each float64."""
        rate, decay = self.rates.get(name, (0.0, 0.0))
        shrunk = -rate * decay * self.before[name].double()
        return self.update(name) - shrunk, shrunk

    @property
    def added(self) -> Tensors:
        """Return what the step added to each value."""
        return {name: self.update(name) for name in self.after}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedTensor:
    """Hold what left a module, or the gradient with respect to it, as a rank has it.

    `call` counts the forward passes of the module in a step. `source` is the module whose output it
    took as its first input, where that was seen.
    """

    step: int
    name: str
    call: int
    gradient: bool
    values: torch.Tensor
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTokens:
    """Hold what a cross-entropy was of: labels of one after the other token, and its logits.

    `logits_nV` is None where the rank has only a part of the classes.
    """

    step: int
    labels_n: torch.Tensor
    num_classes: int
    ignored: int
    logits_nV: torch.Tensor | None

    def token_losses(self, num_classes: int | None = None) -> torch.Tensor:
        """Return the loss of each label that counts, over the first `num_classes`, float64."""
        assert self.logits_nV is not None, "asked for only where the logits are whole"
        counted = self.labels_n != self.ignored
        logits_nV = self.logits_nV[counted, :num_classes].double()
        return fn.cross_entropy(logits_nV, self.labels_n[counted], reduction="none")


@dataclass(slots=True)
class Passed:
    """Hold all that passed on one rank, in the order in which it was seen."""

    tensors: list[PassedTensor] = field(default_factory=list[PassedTensor])
    tokens: list[CountedTokens] = field(default_factory=list[CountedTokens])
