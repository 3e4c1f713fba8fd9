# SPDX-License-Identifier: Apache-2.0
"""A training step on one device, and what all ranks had of it, put together by its names.

Shape suffixes: n tokens, V classes; B sequences, H heads, T queries, S keys, d width of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch.nn import functional as fn

INITIAL = -1
"""The step under which the initial weights are kept."""

PARAMETERS = "parameters"
GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart(ABC):
    """Hold the part of a tensor of one device that a rank had at one time.

    `kind` is "gradients", "parameters", or what else a rank may have of a parameter.
    """

    rank: int
    kind: str
    step: int
    name: str
    tensor: torch.Tensor

    @abstractmethod
    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same elements of a whole tensor, in the shape of `tensor`."""

    @abstractmethod
    def put_into(self, whole: torch.Tensor) -> None:
        """Write the part where it lies in a whole tensor."""


class Reported(Protocol):
    """What a rank says of a step; None where it does not."""

    @property
    def loss(self) -> float | None: ...

    @property
    def grad_norm(self) -> float | None: ...


Part_co = TypeVar("Part_co", bound=HeldPart, covariant=True)


class ProgramRun(ABC, Generic[Part_co]):
    """Hold the parts that ranks had, and answer by the names of one device."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], parts: Iterable[Part_co]) -> None:
        """Sort the parts by what they are of; `shapes` are those of whole tensors."""
        self.shapes = shapes
        self._parts: dict[tuple[str, int, str], list[Part_co]] = defaultdict(list)
        for part in parts:
            self._parts[part.kind, part.step, part.name].append(part)

    @property
    def value_kinds(self) -> tuple[str, ...]:
        """Return the kinds of values that are told: last those that the optimizer updates."""
        return (PARAMETERS,)

    @property
    def values_kind(self) -> str:
        """Return the kind of the values that the optimizer updates, as far as they are told."""
        return self.value_kinds[-1]

    @property
    def reads_clipped(self) -> bool:
        """Return whether the gradients were read after clipping."""
        return False

    @abstractmethod
    def reports(self, step: int) -> Sequence[Reported]:
        """Return what each rank said of a step, in the order of ranks."""

    def parts(self, kind: str, step: int, name: str) -> Sequence[Part_co]:
        """Return all parts of a tensor, those of rank 0 first."""
        return self._parts.get((kind, step, name), ())

    def names(self, kind: str, step: int) -> set[str]:
        """Return the names that any rank gave, known or not."""
        return {name for k, s, name in self._parts if (k, s) == (kind, step)}

    def kinds(self, step: int) -> list[str]:
        """Return the kinds of values of a step."""
        return list(dict.fromkeys(kind for kind, when, _ in self._parts if when == step))

    def holders(self, kind: str, step: int, name: str) -> list[int]:
        """Return the ranks that have any of a tensor."""
        return sorted({part.rank for part in self.parts(kind, step, name)})

    def fits(self, part: HeldPart) -> bool:
        """Return whether a part lies within the tensor that it names."""
        return part.name in self.shapes

    def whole(self, kind: str, step: int, name: str) -> torch.Tensor:
        """Return a tensor, float64: each element from the first rank that has it, NaN from none."""
        whole = torch.full(self.shapes[name], torch.nan, dtype=torch.float64)
        for part in reversed(self.parts(kind, step, name)):
            part.put_into(whole)
        return whole

    def differing(self, kind: str, step: int, name: str, whole: torch.Tensor) -> list[int]:
        """Ranks whose part of a tensor has other bits than `whole`, or does not fit into it."""
        return sorted(
            {
                part.rank
                for part in self.parts(kind, step, name)
                if not self.fits(part)
                or not torch.equal(part.tensor.double(), part.of(whole).double())
            }
        )

    def vectors(self, kind: str, step: int, name: str) -> dict[int, torch.Tensor]:
        """Elements of a tensor on each rank that has some, flat, float64; NaN elsewhere."""
        ranks = self.holders(kind, step, name)
        return {rank: self.vector(kind, step, name, rank) for rank in ranks}

    def vector(self, kind: str, step: int, name: str, rank: int) -> torch.Tensor:
        """Return the elements of a tensor that a rank has, flat, float64; NaN elsewhere."""
        whole = torch.full(self.shapes[name], torch.nan, dtype=torch.float64)
        for part in self.parts(kind, step, name):
            if part.rank == rank:
                part.put_into(whole)
        return whole.reshape(-1)

    def update(self, step: int, name: str) -> torch.Tensor:
        """Return what `step` added to a value, float64."""
        before = self.whole(self.values_kind, step - 1 if step else INITIAL, name)
        return self.whole(self.values_kind, step, name) - before


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
    terms: Sequence[Tensors] = ()
    """Gradient of each term of a loss that is a sum, such as a cross-entropy and a balance loss."""

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


ITS_INPUT = " (input)"
"""After the name of a module: its input, if no watched module made it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionArguments:
    """Arguments of a scaled dot-product attention inside of a module.

    `allowed` is true if query T may attend to key S: [T, S], or [B, 1 or H, T, S]. Scores are
    multiplied by `scale`.
    """

    step: int
    name: str
    call: int
    q_BHTd: torch.Tensor
    k_BHSd: torch.Tensor
    v_BHSd: torch.Tensor
    allowed: torch.Tensor
    scale: float


@dataclass(slots=True)
class Passed:
    """Hold all that passed on one rank, in the order in which it was seen."""

    tensors: list[PassedTensor] = field(default_factory=list[PassedTensor])
    tokens: list[CountedTokens] = field(default_factory=list[CountedTokens])
    attention: list[AttentionArguments] = field(default_factory=list[AttentionArguments])
