# SPDX-License-Identifier: Apache-2.0
"""How old the weights are that a pipeline computes gradients with: PipeDream's ways, and a flush.

A pipeline that never drains has no bubble, but microbatches are in flight while weights change.
What that means for the gradient is counted here, action by action, for the ways that Harlap et al.,
"PipeDream: Fast and Efficient Pipeline Parallel DNN Training" (arXiv 1806.03377), and Narayanan et
al., "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), describe. Versions of
the weights of a stage are numbered by the updates that made them; each stage has its own.

Only a schedule with a flush (each builder's here) gives the gradient of one device, so only those
can be run: this is a table, not an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builders.one_f_one_b import OneFOneB

WeightReads = Literal["newest", "stashed", "entered"]
"""Which version of a stage's weights a microbatch is computed with.

- newest: forward and backward each take the newest one, nothing is kept.
- stashed: forward takes the newest, and backward the same again (weight stashing).
- entered: what was newest on stage 0 when the first microbatch of the same update entered there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateRule:
    """Say when weights change, and which of them a microbatch reads.

    `flush`: the pipeline drains before each update. `whole_steps`: an update has the gradients of
    all microbatches of a step; else of one microbatch.
    """

    name: str
    source: str
    reads: WeightReads
    flush: bool = False
    whole_steps: bool = False


WEIGHT_UPDATE_RULES = (
    WeightUpdateRule(name="without stashing", source="arXiv 1806.03377 avoids it", reads="newest"),
    WeightUpdateRule(name="PipeDream", source="arXiv 1806.03377", reads="stashed"),
    WeightUpdateRule(name="PipeDream, vertical sync", source="arXiv 1806.03377", reads="entered"),
    WeightUpdateRule(
        name="PipeDream-2BW", source="arXiv 2006.09503", reads="entered", whole_steps=True
    ),
    WeightUpdateRule(
        name="PipeDream-Flush",
        source="arXiv 2006.09503: 1f1b here",
        reads="newest",
        flush=True,
        whole_steps=True,
    ),
)
"""From the oldest weights to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersions:
    """Say which versions of a stage's weights one microbatch meets.

    Its gradient goes into the update that turns version `applied` into the next one.
    """

    forward: int
    backward: int
    applied: int

    @property
    def staleness(self) -> int:
        """Return how many updates older than the updated ones the forward pass's weights are."""
        return self.applied - self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleStage:
    """State the weights of one stage: per microbatch, and the most versions kept at once."""

    microbatches: tuple[WeightVersions, ...]
    kept: int

    @property
    def staleness(self) -> int:
        """Return the staleness of the last microbatch: the first ones have no older weights."""
        return self.microbatches[-1].staleness

    @property
    def is_gradient(self) -> bool:
        """Return whether each backward pass differentiates what its forward pass computed."""
        return all(one.forward == one.backward for one in self.microbatches)


def staleness(
    discipline: WeightUpdateRule, *, num_ranks: int, num_microbatches: int, num_steps: int = 4
) -> tuple[StaleStage, ...]:
    """Return the versions that each stage reads in `num_steps` steps, one stage to a rank.

    Without a flush the order is 1F1B that goes on through the steps. Where weights change after
    each microbatch, a step is as many microbatches all the same.
    """
    pipe = _StalePipeline(
        discipline=discipline,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_steps=num_steps,
    )
    entered = pipe.entered()
    return tuple(pipe.stage(stage, entered) for stage in range(num_ranks))


def gives_reference_gradient(stages: tuple[StaleStage, ...]) -> bool:
    """Return whether every gradient is one of the weights that it updates, on all stages."""
    return all(
        one.forward == one.backward == one.applied for stage in stages for one in stage.microbatches
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StalePipeline:
    """Run the stages of one pipeline, each on its own: what it waits for changes no version."""

    discipline: WeightUpdateRule
    num_ranks: int
    num_microbatches: int
    num_steps: int

    @property
    def per_update(self) -> int:
        """Return the microbatches whose gradients make one update."""
        return self.num_microbatches if self.discipline.whole_steps else 1

    def row(self, stage: int) -> tuple[Action, ...]:
        """Return the actions of a stage: steps one after another, or one 1F1B through them all."""
        microbatches, steps = self.num_microbatches, self.num_steps
        if not self.discipline.flush:
            microbatches, steps = microbatches * steps, 1
        once = OneFOneB(
            num_stages=self.num_ranks, num_ranks=self.num_ranks, num_microbatches=microbatches
        ).rank_actions(stage)
        return tuple(
            Action(action.kind, action.stage, step * microbatches + action.microbatch)
            for step in range(steps)
            for action in once
        )

    def entered(self) -> list[int]:
        """Return, per update, the newest version on stage 0 when its first microbatch enters."""
        found: list[int] = []
        backwards = 0
        for action in self.row(0):
            if action.kind is not ActionKind.F:
                backwards += 1
            elif action.microbatch % self.per_update == 0:
                found.append(backwards // self.per_update)
        return found

    def stage(self, stage: int, entered: list[int]) -> StaleStage:
        """Run one stage: its versions are made by its own backward passes, which come in order."""
        reads, row = self.discipline.reads, self.row(stage)
        read: dict[int, int] = {}
        found: list[WeightVersions] = []
        newest: list[int] = []
        last_read: dict[int, int] = {}
        for place, action in enumerate(row):
            version = len(found) // self.per_update
            newest.append(version)
            if action.kind is ActionKind.F:
                if reads == "entered":
                    version = entered[action.microbatch // self.per_update]
                read[action.microbatch] = version
            else:
                forward = read[action.microbatch]
                applied, version = version, version if reads == "newest" else forward
                found.append(WeightVersions(forward=forward, backward=version, applied=applied))
            last_read[version] = place
        return StaleStage(microbatches=tuple(found), kept=_most_kept(newest, last_read))


def _most_kept(newest: list[int], last_read: dict[int, int]) -> int:
    """Return the most versions that are there at once: the newest, and what is still to be read."""
    return max(
        len({now, *(one for one, last in last_read.items() if one <= now and last >= place)})
        for place, now in enumerate(newest)
    )
