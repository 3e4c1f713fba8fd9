# SPDX-License-Identifier: Apache-2.0
"""One process trains the islands of a run one after another, as those met that were there.

    islands that met   d = mean over them of p - p_i;  the outer step;  p_i = p
    one that is lost   what it did since its last meeting counts nowhere
    one that is back   p and momentum of the first island that met; an inner optimizer that begins

Each island has outer parameters and momentum of its own here, though all must be the same: one that
was given something else goes its own way. Inner steps and the outer formula are the oracle's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from echelon.core.plan import Plan
from echelon.layout.islands import island_plan
from echelon.proof.lost_islands.record import MOMENTUM, PARAMETERS, VALUES
from echelon.proof.oracle.local_sgd import meets, outer_formula
from echelon.proof.oracle.oracle import OracleRun

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingMistake:
    """Say what a replay does otherwise; the right one does nothing so."""

    name: str = ""
    """The factor that it is told under."""
    says: str = ""
    """What it is, in words."""
    divides_by_all: bool = False
    """Whether the sum over those that met is divided by the number of all islands."""
    adds_up: bool = False
    """Whether it is divided by nothing."""
    no_momentum: bool = False
    """Whether an island that comes back begins with no outer momentum."""
    own_values: bool = False
    """Whether it goes on from the first values of the run."""
    momentum_anew: bool = False
    """Whether all islands forget their momentum where others met than before."""


RIGHT = MeetingMistake()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetIslands:
    """Say which islands met after so many steps, and which came in then."""

    step: int
    members: tuple[int, ...]
    joins: tuple[int, ...]


@dataclass(slots=True)
class MeetingReplay:
    """MeetingReplay recorded meetings of `plan`, in their order, with a mistake."""

    plan: Plan
    met: Sequence[MetIslands]
    mistake: MeetingMistake = RIGHT
    held: dict[tuple[int, int, str], dict[str, torch.Tensor]] = field(
        default_factory=dict[tuple[int, int, str], dict[str, torch.Tensor]]
    )
    """What each island has where it met or came in, by (steps done, island, kind)."""
    losses: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """The mean loss of a step (from 0) of an island, by (step, island): of those that count."""

    def run(self) -> MeetingReplay:
        """Take all steps up to the last meeting."""
        local, plan = self.plan.mathematics.local_sgd, self.plan
        runs = {i: OracleRun(island_plan(plan, i)) for i in range(local.islands)}
        outer = {i: {n: v.clone() for n, v in run.values.items()} for i, run in runs.items()}
        zeros = {n: torch.zeros_like(v) for n, v in outer[0].items()}
        momentum = {i: dict(zeros) for i in runs}
        first, met_before, done = dict(outer[0]), tuple(runs), 0
        for one in self.met:
            said = {
                (step, i): runs[i].step(step) for step in range(done, one.step) for i in one.members
            }
            self.losses |= {key: step.loss for key, step in said.items()}
            done = one.step
            if self.mistake.momentum_anew and one.members != met_before:
                momentum = {i: dict(zeros) for i in momentum}
            met_before = (*one.members, *one.joins)
            for name in (name for name in zeros if meets(local, name, one.step - 1)):
                moved = [outer[i][name] - runs[i].values[name] for i in one.members]
                mean = torch.stack(moved).sum(0) / self._divisor(one)
                for i in one.members:
                    outer[i][name], momentum[i][name] = outer_formula(
                        local, outer[i][name], mean, momentum[i][name]
                    )
                    runs[i].values[name] = outer[i][name]
            giver = one.members[0]
            for i in one.joins:
                outer[i] = dict(first if self.mistake.own_values else outer[giver])
                momentum[i] = dict(zeros if self.mistake.no_momentum else momentum[giver])
                runs[i] = OracleRun(island_plan(plan, i), initial=outer[i])
            for i in (*one.members, *one.joins):
                self.held[one.step, i, VALUES] = dict(runs[i].values)
                self.held[one.step, i, PARAMETERS] = dict(outer[i])
                self.held[one.step, i, MOMENTUM] = dict(momentum[i])
        return self

    def _divisor(self, one: MetIslands) -> int:
        if self.mistake.adds_up:
            return 1
        all_of_them = self.plan.mathematics.local_sgd.islands
        return all_of_them if self.mistake.divides_by_all else len(one.members)
