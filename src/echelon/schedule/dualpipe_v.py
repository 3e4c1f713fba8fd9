# SPDX-License-Identifier: Apache-2.0
"""DualPipeV: DualPipe cut in half, so that one copy of the parameters is enough.

Half of DualPipe's ranks mirror the other half; Sea AI Lab cut them off and folded the pipeline into
a V ("cut-in-half"), as the authors' code has it (github.com/deepseek-ai/DualPipe). The streams that
meet are then the way down and the way back of the same microbatches.
"""

from __future__ import annotations

from types import MappingProxyType

from echelon.schedule.action import Action
from echelon.schedule.builder import EQUAL_TIMES, ActionTimes, VShaped
from echelon.schedule.dualpipe import meeting_idle_s, meeting_streams


class DualPipeV(VShaped):
    """Build DualPipeV."""

    name = "dualpipe-v"
    paper = "DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, cut in half"
    suits = "as dualpipe, with one copy of the parameters"
    closed_forms = "echelon.cost.inputs.pipeline:DUALPIPE_V"
    microbatches_per_rank = 2  # as the authors demand: the number of stages
    ends_on_first_rank = True
    tool_names = MappingProxyType({"torchtitan": "DualPipeV"})

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return the stage on the way down as the near stream, the one on the way back as far."""
        microbatches = range(self.num_microbatches)
        return meeting_streams(
            rank=rank,
            num_ranks=self.num_ranks,
            near=tuple((rank, microbatch) for microbatch in microbatches),
            far=tuple((self.num_stages - 1 - rank, microbatch) for microbatch in microbatches),
        )

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+B-W) if W <= B <= F <= B + W, or the longest of other chains.

        F, B and W are those of one of the 2p stages.
        """
        return meeting_idle_s(times, self.num_ranks)

    def paper_bubble_s(
        self, times: ActionTimes = EQUAL_TIMES, overlapped_pair_s: float | None = None
    ) -> float:
        """Return (p-1)(F&B+B-3W), B being the whole backward pass; the paper's PP is 2p here.

        It is exact if F&B lasts F + B and gives both results only at its end.
        """
        both = times.total_s if overlapped_pair_s is None else overlapped_pair_s
        return (self.num_ranks - 1) * (both + times.backward_s - 3 * times.weight_gradient_s)

    def peak_in_flight(self, stage: int) -> int:
        """Return 2p - stage."""
        return self.num_stages - stage

    def peak_in_flight_of_rank(self, rank: int) -> int:
        """Return 2p + 1 half-stages."""
        del rank
        return self.num_stages + 1
