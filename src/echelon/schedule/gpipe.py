"""GPipe: all forward passes, then all backward passes.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
(arXiv 1811.06965), figure 2(c). The paper also stores only stage boundaries and recomputes the
rest in backward; here that is a separate choice (the recompute policy).
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builder import EQUAL_TIMES, ActionTimes, Builder


class GPipe(Builder):
    """Build GPipe's schedule.

    Backward passes run in the order 0 .. m-1, as in the other schedules, so that all of them add
    up the gradients of the microbatches in the same order.
    """

    __slots__ = ()

    name: ClassVar[str] = "gpipe"
    paper: ClassVar[str] = "Huang et al. 2019, GPipe, arXiv 1811.06965, section 2.3"

    @classmethod
    def minimum_microbatches(cls, num_ranks: int) -> int:
        """Return 1: with a single microbatch GPipe is the naive schedule, and correct."""
        return 1

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return F of all microbatches, then BW of all microbatches."""
        return tuple(
            Action(kind, rank, microbatch)
            for kind in (ActionKind.F, ActionKind.BW)
            for microbatch in range(self.num_microbatches)
        )

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+BW): the overhead is (p-1)/m, the fraction of the step (p-1)/(m+p-1)."""
        return (self.num_ranks - 1) * times.total_s

    def peak_in_flight(self, stage: int) -> int:
        """Return m for every stage: nothing is freed before the last forward pass."""
        return self.num_microbatches
