# SPDX-License-Identifier: Apache-2.0
"""Breadth-first: each rank owns several stages and runs all microbatches of one before the next.

Lamy-Poirier, "Breadth-First Pipeline Parallelism" (arXiv 2211.05953), section 4: the looped
placement of interleaved 1F1B, but all microbatches cross a rank's stage before its next stage
starts. It holds as many activations as GPipe; in exchange a stage's parameters are needed once
forward and once backward in a step, which is what fully sharded data parallelism (ZeRO-3) wants.
"""

from __future__ import annotations

from types import MappingProxyType

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builder import Looped


class BreadthFirst(Looped):
    """Build the looped breadth-first schedule."""

    name = "breadth-first"
    paper = "Lamy-Poirier 2022, arXiv 2211.05953, section 4"
    suits = "stages are gathered or summed over data ranks: each is used in one run"
    closed_forms = "echelon.cost.inputs.pipeline:BREADTH_FIRST"
    is_searched = False
    short_name = "breadth"
    tool_names = MappingProxyType({"torchtitan": "LoopedBFS"})

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return F of all microbatches stage by stage, then BW from the last stage to the first."""
        stages = range(rank, self.num_stages, self.num_ranks)
        return tuple(
            Action(kind, stage, microbatch)
            for kind, order in ((ActionKind.F, stages), (ActionKind.BW, reversed(stages)))
            for stage in order
            for microbatch in range(self.num_microbatches)
        )

    def peak_in_flight(self, stage: int) -> int:
        """Return m for every stage: nothing is freed before the last forward pass."""
        del stage
        return self.num_microbatches

    def peak_in_flight_of_rank(self, rank: int) -> int:
        """Return v m, all of them."""
        del rank
        return self.num_microbatches * self.num_stages // self.num_ranks
