# SPDX-License-Identifier: Apache-2.0
"""The forward passes alone, for an evaluation on the stages of a training schedule.

The number of microbatches is free: an evaluation may have fewer than the schedule needs for
training, or an odd number. Where the training schedule has mirrored microbatches, every second one
is mirrored here, so that both copies of the model work from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from echelon.schedule.action import Action, ActionKind, Schedule


@lru_cache(maxsize=16)
def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return the evaluation of `num_microbatches` on the stages of `schedule`.

    Ranks take what is there, in the order of `_urgency`, as if all stages took equally long: no
    rank waits while it could work. It cannot deadlock, being an order that has run.
    """
    empty = replace(
        schedule,
        name=f"{schedule.name} (forward)",
        num_microbatches=num_microbatches,
        actions=(),
        mirrored=tuple(range(1, num_microbatches, 2)) if schedule.mirrored else (),
    )
    return replace(empty, actions=_rows(empty))


_Cell = tuple[int, int]
"""A stage and a microbatch."""


def _rows(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Run one action per rank and tick, until all have run."""
    ready: list[set[_Cell]] = [set() for _ in range(schedule.num_ranks)]
    for microbatch in range(schedule.num_microbatches):
        ready[schedule.rank_of(0, microbatch)].add((0, microbatch))
    rows: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    urgency = _urgency(schedule)
    while any(ready):
        ran: list[_Cell] = []
        for row, cells in zip(rows, ready, strict=True):
            if cells:
                stage, microbatch = min(cells, key=urgency)
                cells.remove((stage, microbatch))
                row.append(Action(ActionKind.F, stage, microbatch))
                ran.append((stage, microbatch))
        for stage, microbatch in ran:
            if stage + 1 < schedule.num_stages:
                ready[schedule.rank_of(stage + 1, microbatch)].add((stage + 1, microbatch))
    return tuple(tuple(row) for row in rows)


def _urgency(schedule: Schedule) -> Callable[[_Cell], tuple[int, ...]]:
    """Return what sorts the cells that a rank could run.

    As a rule the deepest stage comes first, so that what is begun is finished early and few outputs
    wait between stages. In looped placements (interleaved 1F1B) microbatches go around in groups of
    at least p, as a last group of fewer would leave ranks idle.
    """
    owners, num_ranks = schedule.stage_ranks, schedule.num_ranks
    looped = len(owners) > num_ranks and all(
        rank == stage % num_ranks for stage, rank in enumerate(owners)
    )
    last_group = max(0, schedule.num_microbatches // num_ranks - 1)

    def urgency(cell: _Cell) -> tuple[int, ...]:
        stage, microbatch = cell
        if looped:
            return min(microbatch // num_ranks, last_group), stage, microbatch
        return -stage, microbatch

    return urgency
