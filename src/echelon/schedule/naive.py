"""The naive schedule: one microbatch crosses all stages and comes back before the next starts.

One rank works at a time. It is the baseline of Huang et al., "GPipe" (arXiv 1811.06965), figure
2(b), and the easiest pipeline to compare with one device.
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builder import Builder


class Naive(Builder):
    """Build the naive schedule: F then BW of each microbatch in turn."""

    __slots__ = ()

    name: ClassVar[str] = "naive"
    paper: ClassVar[str] = "Huang et al. 2019, GPipe, arXiv 1811.06965, figure 2(b)"

    @classmethod
    def minimum_microbatches(cls, num_stages: int) -> int:
        """Return 1: each microbatch is on its own."""
        return 1

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return F and BW of microbatch 0, then of microbatch 1, and so on."""
        return tuple(
            Action(kind, rank, microbatch)
            for microbatch in range(self.num_microbatches)
            for kind in (ActionKind.F, ActionKind.BW)
        )

    def bubble_overhead(self) -> float:
        """Return p - 1: a rank idles while each of the others works; the fraction is (p-1)/p."""
        return float(self.num_ranks - 1)

    def peak_in_flight(self, stage: int) -> int:
        """Return 1 for every stage: a microbatch is finished before the next starts."""
        return 1
