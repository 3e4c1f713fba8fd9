"""The looped placement: several stages on each rank, dealt out in turn, stage s on rank s % p.

Narayanan et al. 2021 (arXiv 2104.04473, section 2.2.2) call them virtual stages, Lamy-Poirier 2022
(arXiv 2211.05953, section 4) a looped pipeline. What is shared here is where stages lie and what
that asks of microbatches; `interleaved.py` and `breadth_first.py` have the orders.
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.builder import EQUAL_TIMES, ActionTimes, Builder


class Looped(Builder):
    """Build a schedule whose ranks hold two or more stages each, in turn."""

    __slots__ = ()

    places: ClassVar[str] = (
        "two or more stages on each pipeline rank, stage s on rank s % num_ranks"
    )
    default_virtual_stages: ClassVar[int] = 2

    @classmethod
    def minimum_microbatches(cls, num_ranks: int) -> int:
        """Return p: fewer come back to rank 0 before the last rank has seen the first of them."""
        return num_ranks

    @classmethod
    def fits_virtual_stages(cls, virtual_stages: int) -> bool:
        """Return whether each rank holds several stages; with one it would be 1F1B or GPipe."""
        return virtual_stages >= 2

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+BW) of one stage: the overhead is (p-1)/(v m)."""
        return (self.num_ranks - 1) * times.total_s
