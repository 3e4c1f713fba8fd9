# SPDX-License-Identifier: Apache-2.0
"""Several stages on a rank: interleaved 1F1B, and breadth-first.

Interleaved 1F1B fills and drains by smaller stages: Narayanan et al., "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.2.2 and
figure 4. Stage s is on rank s % p (looped placement). The bubble shrinks by the number of stages
per rank; there are as many times more messages.

Breadth-first: Lamy-Poirier, "Breadth-First Pipeline Parallelism" (arXiv 2211.05953), section 4: the
same placement, but all microbatches cross a rank's stage before its next stage starts. It holds as
many activations as GPipe; in exchange a stage's parameters are needed once forward and once
backward in a step, which is what fully sharded data parallelism (ZeRO-3) wants.
"""

from __future__ import annotations

from itertools import accumulate
from types import MappingProxyType

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builders.builder import Looped


class Interleaved(Looped):
    """Build interleaved 1F1B for any number of microbatches from p on.

    The microbatches are cut into m // p groups of at least p, as equal as they can be, larger ones
    first. A group crosses all stages of a rank before the next group starts. The paper demands that
    p divides m, which makes all groups p long. A group of more than p fills the pipeline as well,
    and costs no bubble, only activations: so other counts are allowed. A group of fewer than p
    would leave ranks idle, so m < p is refused.
    """

    name = "interleaved-1f1b"
    paper = "Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2"
    suits = "m is small beside p and links are fast: v times the messages"
    closed_forms = "echelon.cost.inputs.pipeline:INTERLEAVED"
    short_name = "1f1b"
    tool_names = MappingProxyType({"megatron": "interleaved", "torchtitan": "Interleaved1F1B"})

    def groups(self) -> tuple[int, ...]:
        """Return how many microbatches each group has."""
        count = self.num_microbatches // self.num_ranks
        size, longer = divmod(self.num_microbatches, count)
        return (size + 1,) * longer + (size,) * (count - longer)

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return the warm-up forwards, then F and BW in turn, then the remaining backwards."""
        chunks = range(self._virtual_stages)
        forward: list[Action] = []
        backward: list[Action] = []
        for start, size in zip(self._starts(), self.groups(), strict=True):
            group = range(start, start + size)
            for kind, order, actions in (
                (ActionKind.F, chunks, forward),
                (ActionKind.BW, reversed(chunks), backward),
            ):
                actions.extend(
                    Action(kind, chunk * self.num_ranks + rank, microbatch)
                    for chunk in order
                    for microbatch in group
                )
        warm_up = self._warm_up(rank)
        actions = forward[:warm_up]
        for pair in zip(forward[warm_up:], backward, strict=False):
            actions.extend(pair)
        return (*actions, *backward[len(forward) - warm_up :])

    def peak_in_flight(self, stage: int) -> int:
        """Return what is held when the last microbatch of some group has entered the stage.

        Group k of g_k microbatches enters its chunk c as forward number v S_k + (c+1) g_k, S_k
        microbatches being in earlier groups; the backward passes run behind by the warm-up and one.
        """
        chunk, rank = divmod(stage, self.num_ranks)
        sizes, starts = self.groups(), self._starts()
        behind = self._warm_up(rank) + 1
        peak = 0
        for start, size in zip(starts, sizes, strict=True):
            done = self._virtual_stages * start + (chunk + 1) * size - behind
            freed = sum(
                max(0, min(other, done - self._backward_number(chunk, first, other)))
                for first, other in zip(starts, sizes, strict=True)
            )
            peak = max(peak, start + size - freed)
        return peak

    def peak_in_flight_of_rank(self, rank: int) -> int:
        """Return min(v m, 2 (p-1-rank) + (v-1) g + 1), g the longest group."""
        return min(self._warm_up(rank) + 1, self._virtual_stages * self.num_microbatches)

    @property
    def _virtual_stages(self) -> int:
        return self.num_stages // self.num_ranks

    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.groups()[:-1], initial=0))

    def _backward_number(self, chunk: int, start: int, size: int) -> int:
        """Return how many backward passes stand before those of a group on a chunk."""
        return self._virtual_stages * start + (self._virtual_stages - 1 - chunk) * size

    def _warm_up(self, rank: int) -> int:
        ahead = 2 * (self.num_ranks - 1 - rank) + (self._virtual_stages - 1) * self.groups()[0]
        return min(ahead, self._virtual_stages * self.num_microbatches)


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
