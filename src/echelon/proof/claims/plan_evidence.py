# SPDX-License-Identifier: Apache-2.0
"""The evidence of a plan: what any program has, and what a plan promises beside its mathematics."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.plan import Plan
from echelon.layout.islands import Island
from echelon.proof.evidence.evidence import CapturedEvidence, Evidence
from echelon.proof.evidence.mesh import AxisGroups, named_groups
from echelon.proof.evidence.run import Tensors
from echelon.proof.late import LateRun
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.local_sgd import OuterStep
from echelon.proof.oracle.oracle import OracleStep, initial_parameters
from echelon.proof.subject import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsEvidence:
    """Hold what an island of local SGD has in common with the others.

    `plan` is that of all, `outer` what the oracle made of each meeting, `observed` what the ranks
    of each island said.
    """

    plan: Plan
    island: Island
    outer: Sequence[OuterStep]
    observed: Sequence[ObservedRun]

    @property
    def local(self) -> LocalSgd:
        """Return how often islands meet, and what they make of it."""
        return self.plan.mathematics.local_sgd

    def changed(self, step: int) -> Collection[str]:
        """Return the tensors that an outer step at the end of `step` changes."""
        return self.outer[step].changed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvidence(Evidence[OracleStep, ObservedRun]):
    """Hold the two sides of a proof of a plan in one precision, and what the plan promises.

    `plan` is what the ranks ran; `steps` are float64 in every precision, and `reference_plan` the
    plan that one device ran. `rounded` is one device in the precision of the ranks, where that is
    not float64, rounded in several ways; `late` is the run with late completion, where there was
    one. Of an island of local SGD `rounds` is what it shares with the others.
    """

    plan: Plan
    reference_plan: Plan
    late: LateRun | None = None
    rounded: Sequence[Sequence[OracleStep]] = ()
    rounds: RoundsEvidence | None = None

    @property
    def initial(self) -> Tensors:
        """First weights of one device, by the plan's seed."""
        return initial_parameters(self.plan)

    def changed_outside(self, step: int) -> Collection[str]:
        """Return the values that an outer step changes at the end of `step`, after the inner."""
        return () if self.rounds is None else self.rounds.changed(step)

    def reports(self) -> Iterator[tuple[OracleStep, int, StepRecord]]:
        """Yield each step of one device beside what each rank said of it."""
        for oracle in self.steps:
            for rank, report in enumerate(self.run.reports(oracle.step)):
                yield oracle, rank, report

    def axes(self, name: str = "") -> AxisGroups:
        spec = self.run.specs.get(name)
        return named_groups(self.plan, expert=spec is not None and spec.expert is not None)


JudgedEvidence = PlanEvidence | CapturedEvidence
"""Evidence of our engine, or of a program that is not ours: one judge, one room of causes."""
