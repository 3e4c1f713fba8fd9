# SPDX-License-Identifier: Apache-2.0
"""A schedule as flat lists of numbers, timed for many plans: what plans of one order share.

The lists of ranks fix which action comes before which, whatever the durations; so a schedule is put
into one order once, in which each action stands after all that it needs, and a plan's durations run
through that order. Messages take no time here. To the last bit this is what
`schedule/simulate.py` gives for durations without transfers
(`tests/schedule/test_flat_schedule.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.simulate import KINDS, Durations

KEPT = 128
"""Orders of one search that are kept: finalists share few of them."""


@dataclass(frozen=True, slots=True)
class FlatSchedule:
    """Hold the actions of a schedule in an order that works.

    Of each: its rank, what it needs (a place in this order, or itself where it needs nothing), and
    its lane: one kind on one stage, kind x stages + stage.
    `rows` are the lanes of each rank's actions in the rank's own order.
    """

    num_ranks: int
    num_stages: int
    ranks: list[int]
    needs: list[int]
    duration_index: list[int]
    rows: tuple[list[int], ...]

    def makespan_s(self, durations: Durations) -> float:
        """Return how long all actions take; transfers are free."""
        seconds = list(chain(*durations.by_kind))
        free = [0.0] * self.num_ranks
        ends = [0.0] * len(self.ranks)
        actions = zip(self.ranks, self.needs, self.duration_index, strict=True)
        for place, (rank, need, index) in enumerate(actions):
            start, arrived = free[rank], ends[need]
            free[rank] = ends[place] = (arrived if arrived > start else start) + seconds[index]
        return max(free)

    def busy_s(self, durations: Durations) -> list[float]:
        """Return how long each rank computes."""
        seconds = list(chain(*durations.by_kind))
        return [
            sum(seconds[index] * count for index, count in Counter(row).items())
            for row in self.rows
        ]


@lru_cache(maxsize=KEPT)
def build_flat_schedule(
    name: str, num_stages: int, num_ranks: int, num_microbatches: int
) -> FlatSchedule:
    """Return the lanes of a schedule by its name and numbers."""
    return flatten_schedule(
        build_schedule(
            name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
        )
    )


def flatten_schedule(schedule: Schedule) -> FlatSchedule:
    """Return the lanes of a schedule whose ranks do not wait for one another for ever."""
    stages = schedule.num_stages
    number = {kind: place * stages for place, kind in enumerate(KINDS)}
    ranks, needs, duration_index = list[int](), list[int](), list[int]()
    made: dict[tuple[bool, int, int], int] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    heads = [iter(row) for row in schedule.actions]
    held = [next(head, None) for head in heads]
    ready = list(range(len(heads)))
    while ready:
        rank = ready.pop()
        action = held[rank]
        while action is not None:
            forward, place = action.kind is ActionKind.F, len(ranks)
            before = action.stage - 1 if forward else action.stage + 1
            need = place
            if action.kind is not ActionKind.W and 0 <= before < stages:
                wanted = (forward, before, action.microbatch)
                if wanted not in made:
                    waiting[wanted] = rank
                    break
                need = made[wanted]
            ranks.append(rank)
            needs.append(need)
            duration_index.append(number[action.kind] + action.stage)
            if action.kind is not ActionKind.W:
                result = (forward, action.stage, action.microbatch)
                made[result] = place
                if result in waiting:
                    ready.append(waiting.pop(result))
            action = next(heads[rank], None)
        held[rank] = action
    assert len(ranks) == sum(map(len, schedule.actions)), "a schedule waits for itself"
    rows = tuple([number[one.kind] + one.stage for one in row] for row in schedule.actions)
    return FlatSchedule(schedule.num_ranks, stages, ranks, needs, duration_index, rows)
