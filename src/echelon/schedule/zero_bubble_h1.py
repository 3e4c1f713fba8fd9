"""ZB-H1: 1F1B's activation memory, a third of its bubble.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.1, figure 3 (top).
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.builder import EQUAL_TIMES, ActionTimes
from echelon.schedule.zero_bubble import ZeroBubbleH


class ZeroBubbleH1(ZeroBubbleH):
    """Build ZB-H1: p microbatches in flight on every rank."""

    __slots__ = ()

    name: ClassVar[str] = "zb-h1"
    paper: ClassVar[str] = "Qi et al. 2023, Zero Bubble, arXiv 2401.10241, section 2.1"

    def in_flight(self) -> int:
        """Return p, as 1F1B has on its first rank."""
        return self.num_ranks

    def paper_bubble_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+B-W), as in section 2.3, table 2.

        There it is the longest wait of a rank between its own first start and its own last end.
        """
        work = times.forward_s + times.input_gradient_s - times.weight_gradient_s
        return (self.num_ranks - 1) * work

    def paper_bubble_holds(self, times: ActionTimes = EQUAL_TIMES) -> bool:
        """Return whether that is exact: F >= W. If B >= W too, it is the wait of the step."""
        return times.forward_s >= times.weight_gradient_s
