"""DualPipe: microbatches enter the pipeline from both ends, on two copies of the stages.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1, figure 5 and table 2.
Rank r holds stage r for the microbatches that enter at rank 0, and stage p-1-r for those that enter
at rank p-1 (the `mirrored` ones). Its aim is to hide the all-to-all of experts behind the other
stream's compute; it costs twice the parameters.
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.action import Action
from echelon.schedule.bidirectional import meeting_idle_s, meeting_streams, paper_bubble_s
from echelon.schedule.builder import EQUAL_TIMES, ActionTimes, Builder


class DualPipe(Builder):
    """Build DualPipe: microbatches 0 to m/2-1 enter at rank 0, m/2 to m-1 are mirrored."""

    __slots__ = ()

    name: ClassVar[str] = "dualpipe"
    paper: ClassVar[str] = "DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.1"
    places: ClassVar[str] = "one stage, and a copy of its mirror image, on each pipeline rank"
    microbatch_multiple: ClassVar[int] = 2

    @classmethod
    def minimum_microbatches(cls, num_ranks: int) -> int:
        """Return 2p, as the authors demand: p for each direction."""
        return 2 * num_ranks

    @classmethod
    def fits_ranks(cls, num_ranks: int) -> bool:
        """Return whether p is even: no rank may be its own mirror image."""
        return num_ranks >= 2 and num_ranks % 2 == 0

    def mirrored(self) -> tuple[int, ...]:
        """Return the second half of the microbatches."""
        return tuple(range(self.num_microbatches // 2, self.num_microbatches))

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return both streams, the one that enters at the nearer end first."""
        half = self.num_microbatches // 2
        mirror = self.num_ranks - 1 - rank
        straight = tuple((rank, microbatch) for microbatch in range(half))
        mirrored = tuple((mirror, microbatch) for microbatch in self.mirrored())
        near, far = (straight, mirrored) if rank < mirror else (mirrored, straight)
        return meeting_streams(
            rank=min(rank, mirror), num_ranks=self.num_ranks // 2, near=near, far=far
        )

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p/2-1)(F+B-W) if W <= B <= F <= B + W, or the longest of other chains.

        Less than the paper's, by (p/2-1) B: see `paper_bubble_s`.
        """
        return meeting_idle_s(times, self.num_ranks // 2)

    def paper_bubble_s(
        self, times: ActionTimes = EQUAL_TIMES, overlapped_pair_s: float | None = None
    ) -> float:
        """Return (p/2-1)(F&B+B-3W), B being the whole backward pass (table 2).

        It is exact if F&B lasts F + B and gives both results only at its end.
        """
        return paper_bubble_s(times, self.num_ranks // 2, overlapped_pair_s)

    def peak_in_flight(self, stage: int) -> int:
        """Return p - stage, on each of the two ranks that hold the stage."""
        return self.num_ranks - stage

    def peak_in_flight_of_rank(self, rank: int) -> int:
        """Return p + 1."""
        del rank
        return self.num_ranks + 1
