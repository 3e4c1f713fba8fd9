"""1F1B: fill the pipeline, then alternate one forward and one backward pass, then drain it.

The synchronous form (PipeDream-Flush): Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
Training" (arXiv 2006.09503), section 3.2, and "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.2.1. It has GPipe's bubble; what it
saves is activation memory.
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builder import EQUAL_TIMES, ActionTimes, Builder


class OneFOneB(Builder):
    """Build the 1F1B schedule with a flush at the end of the step."""

    __slots__ = ()

    name: ClassVar[str] = "1f1b"
    paper: ClassVar[str] = "Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1"

    @classmethod
    def minimum_microbatches(cls, num_ranks: int) -> int:
        """Return the number of ranks, each of which has one stage.

        The list itself is well defined for fewer, but then stage 0 runs all its forward passes
        before its first backward pass: there is no steady phase, each stage holds what GPipe
        would hold wherever m <= p - i, and the bubble is at least half of the step. Whoever asks
        for 1F1B with m < p has miscounted microbatches, so it is refused; GPipe takes any number.
        """
        return num_ranks

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return p-1-rank warm-up forwards, then F and BW in turn, then the remaining backwards."""
        warm_up = min(self.num_stages - 1 - rank, self.num_microbatches)
        actions = [Action(ActionKind.F, rank, microbatch) for microbatch in range(warm_up)]
        for backward, forward in enumerate(range(warm_up, self.num_microbatches)):
            actions.append(Action(ActionKind.F, rank, forward))
            actions.append(Action(ActionKind.BW, rank, backward))
        steady = self.num_microbatches - warm_up
        actions.extend(
            Action(ActionKind.BW, rank, microbatch)
            for microbatch in range(steady, self.num_microbatches)
        )
        return tuple(actions)

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+BW): the overhead is (p-1)/m, the fraction of the step (p-1)/(m+p-1)."""
        return (self.num_ranks - 1) * times.total_s

    def peak_in_flight(self, stage: int) -> int:
        """Return min(m, p - stage): p at the first stage, 1 at the last."""
        return min(self.num_microbatches, self.num_stages - stage)
