# SPDX-License-Identifier: Apache-2.0
"""Both sides of a proof in one precision: one device in float64, and what the ranks had."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from echelon.proof.evidence.captured import CapturedRun
from echelon.proof.evidence.fits import EXPLAINED
from echelon.proof.evidence.groups import AxisGroups
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.evidence.run import HeldPart, ProgramRun
from echelon.proof.evidence.steps import Passed, ReferenceStep, Tensors
from echelon.proof.evidence.tolerance import Tolerance

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
    def explained(self) -> float:
        roundoff = torch.finfo(self.dtype).eps / 2
        return max(EXPLAINED, 64 * roundoff)

    def axes(self, name: str = "") -> AxisGroups:
        return [(axis, self.mesh.groups((axis,))) for axis in self.mesh.axes]

    def sums(self, name: str) -> AxisGroups:
        return [(" and ".join(axes), self.mesh.groups(axes)) for axes in self.mesh.axis_sets()]
