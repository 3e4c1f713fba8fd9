"""ZB-H2: no rank waits once it has started, for up to twice 1F1B's activation memory.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.2, figure 3 (bottom).
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.builder import EQUAL_TIMES, ActionTimes
from echelon.schedule.zero_bubble import ZeroBubbleH


class ZeroBubbleH2(ZeroBubbleH):
    """Build ZB-H2: 2p-1 microbatches in flight on every rank, or all of them if they are fewer.

    Each microbatch in flight beyond p fills one more gap of ZB-H1; with m = p it is ZB-H1.
    """

    __slots__ = ()

    name: ClassVar[str] = "zb-h2"
    paper: ClassVar[str] = "Qi et al. 2023, Zero Bubble, arXiv 2401.10241, section 2.2"

    def in_flight(self) -> int:
        """Return min(m, 2p-1)."""
        return min(self.num_microbatches, 2 * self.num_ranks - 1)

    def paper_bubble_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+B-2W), as in section 2.3, table 2.

        There it is the longest wait of a rank between its own first start and its own last end.
        Over the whole step a rank also waits for the others to start or to end: `idle_s`.
        """
        work = times.forward_s + times.input_gradient_s - 2 * times.weight_gradient_s
        return (self.num_ranks - 1) * work

    def paper_bubble_holds(self, times: ActionTimes = EQUAL_TIMES) -> bool:
        """Return whether that is exact: m >= 2p-1, F >= W, F + B >= 2W."""
        weight = times.weight_gradient_s
        return (
            self.num_microbatches >= 2 * self.num_ranks - 1
            and times.forward_s >= weight
            and times.forward_s + times.input_gradient_s >= 2 * weight
        )
