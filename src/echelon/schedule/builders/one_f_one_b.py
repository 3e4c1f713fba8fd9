# SPDX-License-Identifier: Apache-2.0
"""1F1B: fill the pipeline, then alternate one forward and one backward pass, then drain it.

The synchronous form (PipeDream-Flush): Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
Training" (arXiv 2006.09503), section 3.2, and "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.2.1. It has GPipe's bubble; what it
saves is activation memory.
"""

from __future__ import annotations

from types import MappingProxyType

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builders.builder import Builder


class OneFOneB(Builder):
    """Build the 1F1B schedule with a flush at the end of the step.

    The list is well defined for m < p too, but then stage 0 runs all its forward passes before its
    first backward pass: there is no steady phase, each stage holds what GPipe would hold wherever
    m <= p - i, and the bubble is at least half of the step. Whoever asks for that has miscounted
    microbatches, so it is refused; GPipe takes any number.
    """

    name = "1f1b"
    paper = "Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1"
    suits = "the start: few messages, and activations that do not grow with m"
    closed_forms = "echelon.cost.inputs.pipeline:ONE_F_ONE_B"
    tool_names = MappingProxyType({"megatron": "1f1b", "deepspeed": "1f1b", "torchtitan": "1F1B"})

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

    def peak_in_flight(self, stage: int) -> int:
        """Return min(m, p - stage): p at the first stage, 1 at the last."""
        return min(self.num_microbatches, self.num_stages - stage)
