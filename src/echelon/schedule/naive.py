"""The naive schedule: one microbatch crosses all stages and comes back before the next starts.

One rank works at a time. It is the baseline of Huang et al., "GPipe" (arXiv 1811.06965), figure
2(b), and the easiest pipeline to compare with one device.
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builder import EQUAL_TIMES, ActionTimes, Builder


class Naive(Builder):
    """Build the naive schedule: F then BW of each microbatch in turn."""

    __slots__ = ()

    name: ClassVar[str] = "naive"
    paper: ClassVar[str] = "Huang et al. 2019, GPipe, arXiv 1811.06965, figure 2(b)"

    @classmethod
    def minimum_microbatches(cls, num_ranks: int) -> int:
        """Return 1: each microbatch is on its own."""
        return 1

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
