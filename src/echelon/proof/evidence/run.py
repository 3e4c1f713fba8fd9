# SPDX-License-Identifier: Apache-2.0
"""What all ranks had of each tensor, put together by the names of one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

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
