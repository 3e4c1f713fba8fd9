# SPDX-License-Identifier: Apache-2.0
"""Both sides of a proof in one precision, and how far apart they may be.

One device in float64, what the ranks had, and what the one device's own errors allow:
`proof/claims/tolerance.py` says why.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from echelon.core.parameters import family_of
from echelon.proof.evidence.captured import CapturedRun, LateCapture
from echelon.proof.evidence.fits import EXPLAINED, FLOOR
from echelon.proof.evidence.mesh import AxisGroups, NamedMesh
from echelon.proof.evidence.run import HeldPart, Passed, ProgramRun, ReferenceStep, Tensors

FLOAT64_TOLERANCE = 1e-10
"""The relative error that a plan may have in float64."""

SAFETY_FACTOR = 4.0
"""How much larger than the one device's a plan's error may be by chance."""

LARGEST_SAFETY_FACTOR = 2.0
"""The same where an error is the largest of hundreds already."""

_LARGEST = frozenset({"scores", "gates"})

_Key = tuple[str, int, str]


ErrorSample = tuple[float, bool]
"""A relative error of one device, and whether the thing itself is next to zero."""


_Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Give the error that is allowed for each thing compared.

    `one_device` holds the largest one-device error of each (kind, step, name), `typical` the root
    mean square per (kind, step) and `family` per (kind, parameter of all blocks); empty in float64.
    `flat` is what a plan adds to it; `flat_of` says it for values, whose own dtype may be finer.
    `own_precision` says that this is not the tolerance of float64.
    """

    flat: float
    one_device: Mapping[_Key, float]
    typical: Mapping[tuple[str, int], float]
    family: Mapping[tuple[str, str], float]
    flat_by_key: Mapping[_Key, float] = field(default_factory=dict[_Key, float])
    own_precision: bool = False

    def allowed(self, kind: str, step: int, name: str) -> float:
        """Return the relative error that is allowed."""
        draws = (
            self.one_device.get((kind, step, name), 0.0),
            self.family.get((kind, family_of(name)), 0.0),
            self.typical.get((kind, step), 0.0),
        )
        luck = LARGEST_SAFETY_FACTOR if kind in _LARGEST else SAFETY_FACTOR
        return luck * max(draws) + self.flat_by_key.get((kind, step, name), self.flat)


def float64_tolerance() -> Tolerance:
    """Return the tolerance of a proof in float64."""
    return Tolerance(flat=FLOAT64_TOLERANCE, one_device={}, typical={}, family={})


def measured(
    runs: Sequence[Mapping[_Key, ErrorSample]], flat: float, flat_of: Mapping[_Key, float]
) -> Tolerance:
    """Return the tolerance that follows from the one device's errors in each run."""
    largest: dict[_Key, float] = defaultdict(float)
    by_step: dict[tuple[str, int], list[float]] = defaultdict(list)
    by_family: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (kind, step, name), (error, noise) in (item for run in runs for item in run.items()):
        largest[kind, step, name] = max(largest[kind, step, name], error)
        by_family[kind, family_of(name)].append(error)
        if not noise:
            by_step[kind, step].append(error)
    typical = {key: _root_mean_square(values) for key, values in by_step.items()}
    # A single number is a draw of its own: the losses of the microbatches say what it is worth.
    for single, many in (("loss", "losses"), ("grad_norm", "gradients")):
        for kind, step in [key for key in typical if key[0] == single]:
            typical[kind, step] = typical[many, step]
    return Tolerance(
        flat=flat,
        one_device=largest,
        typical=typical,
        family={key: _root_mean_square(values) for key, values in by_family.items()},
        flat_by_key=flat_of,
        own_precision=True,
    )


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def tensor_errors(
    kind: str, step: int, exact: _Tensors, rough: _Tensors
) -> Iterator[tuple[_Key, ErrorSample]]:
    """Return the relative error of each tensor, as the claims count it."""
    floor = FLOOR * math.sqrt(sum(float(value.square().sum()) for value in exact.values()))
    for name, value in exact.items():
        error, length = float((rough[name].double() - value).norm()), float(value.norm())
        yield (kind, step, name), (error / max(length, floor), length < floor)


Step_co = TypeVar("Step_co", bound=ReferenceStep, covariant=True)
Run_co = TypeVar("Run_co", bound=ProgramRun[HeldPart], covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(ABC, Generic[Step_co, Run_co]):
    """Hold the steps of one device, what the ranks had, and how far off they may be."""

    steps: Sequence[Step_co]
    run: Run_co
    tolerance: Tolerance

    @property
    def explained(self) -> float:
        """Return the relative residual below which an explanation fits in this precision."""
        return EXPLAINED

    @abstractmethod
    def axes(self, name: str = "") -> AxisGroups:
        """Return the groups along which wrong ranks of a tensor are told from right ones."""

    def sums(self, name: str) -> AxisGroups:
        """Return the groups over which a tensor may have to be summed, the most telling first."""
        return self.axes(name)

    def wanted_gradient(self, step: int, name: str) -> torch.Tensor:
        """Return the gradient that the ranks must have where it is read: clipped or not."""
        of_step = self.steps[step]
        gradient = of_step.clipped(name) if self.run.reads_clipped else of_step.gradients[name]
        return gradient.double()


AnyEvidence = Evidence[ReferenceStep, ProgramRun[HeldPart]]
"""Evidence of any program: of a plan, or captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedEvidence(Evidence[ReferenceStep, CapturedRun]):
    """Hold the two sides of a pass of a program that is not ours: its hooks captured all of it."""

    mesh: NamedMesh
    dtype: torch.dtype
    initial: Tensors
    """First weights of one device."""
    passed: Passed = field(default_factory=Passed)
    """What passed between the modules of one device."""

    @property
    def late(self) -> LateCapture | None:
        """Return the races of a run with late completion; None of another run."""
        return self.run.late

    @property
    def explained(self) -> float:
        roundoff = torch.finfo(self.dtype).eps / 2
        return max(EXPLAINED, 64 * roundoff)

    def axes(self, name: str = "") -> AxisGroups:
        return [(axis, self.mesh.groups((axis,))) for axis in self.mesh.axes]

    def sums(self, name: str) -> AxisGroups:
        return [(" and ".join(axes), self.mesh.groups(axes)) for axes in self.mesh.axis_sets()]
