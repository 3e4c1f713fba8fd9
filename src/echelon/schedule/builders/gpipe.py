# SPDX-License-Identifier: Apache-2.0
"""GPipe: all forward passes, then all backward passes; and the naive schedule beside it.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
(arXiv 1811.06965), figure 2(c). The paper also stores only stage boundaries and recomputes the
rest in backward; here that is a separate choice (the recompute policy). Its baseline, figure 2(b),
lets one microbatch cross all stages and come back before the next starts: one rank works at a time.
"""

from __future__ import annotations

from types import MappingProxyType

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builders.builder import EQUAL_TIMES, ActionTimes, Builder


class Naive(Builder):
    """Build the naive schedule: F then BW of each microbatch in turn."""

    name = "naive"
    paper = "Huang et al. 2019, GPipe, arXiv 1811.06965, figure 2(b)"
    suits = "to look for a fault: one rank works at a time, nothing overlaps"
    closed_forms = "echelon.cost.inputs.pipeline:NAIVE"
    microbatches_per_rank = 0
    is_suggested = False

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return F and BW of microbatch 0, then of microbatch 1, and so on."""
        return tuple(
            Action(kind, rank, microbatch)
            for microbatch in range(self.num_microbatches)
            for kind in (ActionKind.F, ActionKind.BW)
        )

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1) m (F+BW): a rank waits while each of the others works.

        The overhead is p-1, the fraction of the step (p-1)/p.
        """
        return (self.num_ranks - 1) * self.num_microbatches * times.total_s

    def peak_in_flight(self, stage: int) -> int:
        """Return 1 for every stage: a microbatch is finished before the next starts."""
        return 1


class GPipe(Builder):
    """Build GPipe's schedule.

    Backward passes run in the order 0 .. m-1, as in the other schedules, so that all of them add
    up the gradients of the microbatches in the same order.
    """

    name = "gpipe"
    paper = "Huang et al. 2019, GPipe, arXiv 1811.06965, section 2.3"
    suits = "few microbatches (it takes any number), or all of them fit in memory"
    closed_forms = "echelon.cost.inputs.pipeline:GPIPE"
    microbatches_per_rank = 0
    tool_names = MappingProxyType({"torchtitan": "GPipe"})

    @classmethod
    def outdone_from(cls, num_ranks: int) -> int:
        """Return p: with m >= p 1F1B waits as long, and holds p microbatches at most."""
        return num_ranks

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return F of all microbatches, then BW of all microbatches."""
        return tuple(
            Action(kind, rank, microbatch)
            for kind in (ActionKind.F, ActionKind.BW)
            for microbatch in range(self.num_microbatches)
        )

    def peak_in_flight(self, stage: int) -> int:
        """Return m for every stage: nothing is freed before the last forward pass."""
        return self.num_microbatches
