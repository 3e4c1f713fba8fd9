"""Schedules for tests: written by hand, and drawn at random with every freedom that one has.

`mutated_schedules` in `mutations.py` are those with something changed, valid or not.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st

from echelon.core.errors import InfeasiblePlan
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.check import check_schedule


def schedule_of(
    *rows: str, num_microbatches: int, stage_ranks: tuple[int, ...] | None = None
) -> Schedule:
    """Return the schedule whose ranks run `rows`, such as ``F0.0 BW0.0``."""
    return Schedule(
        name="by hand",
        num_ranks=len(rows),
        num_microbatches=num_microbatches,
        stage_ranks=tuple(range(len(rows))) if stage_ranks is None else stage_ranks,
        actions=tuple(tuple(Action.parse(word) for word in row.split()) for row in rows),
    )


def _needs(action: Action, num_stages: int) -> list[tuple[str, int, int]]:
    s, m = action.stage, action.microbatch
    if action.kind is ActionKind.F:
        return [("F", s - 1, m)] if s else []
    if action.kind is ActionKind.W:
        return [("B", s, m)]
    return [("F", s, m)] + ([("B", s + 1, m)] if s + 1 < num_stages else [])


def _cells(num_stages: int, num_microbatches: int, rng: random.Random) -> list[Action]:
    actions: list[Action] = []
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            kinds = rng.choice((("F", "BW"), ("F", "B", "W")))
            actions.extend(Action(ActionKind(kind), stage, microbatch) for kind in kinds)
    return actions


def _placement(num_ranks: int, num_stages: int, rng: random.Random) -> tuple[int, ...]:
    looped = [stage % num_ranks for stage in range(num_stages)]
    folded = [r if (s // num_ranks) % 2 == 0 else num_ranks - 1 - r for s, r in enumerate(looped)]
    return tuple(rng.choice((looped, folded, rng.sample(looped, num_stages))))


def listed(schedule_seed: int, *, may_deadlock: bool = False, mirrors: bool = False) -> Schedule:
    """Run a random action whose needs are met, until all have run; note who ran what.

    Where the schedule may deadlock, needs on other ranks do not hold an action back. Where it
    mirrors, some microbatches cross the ranks the other way round.
    """
    rng = random.Random(schedule_seed)
    num_ranks = rng.randint(1, 4)
    num_stages = num_ranks * rng.randint(1, 3)
    num_microbatches = rng.randint(1, 5)
    owner = _placement(num_ranks, num_stages, rng)
    left = _cells(num_stages, num_microbatches, rng)
    mirrored = [m for m in range(num_microbatches) if mirrors and rng.random() < 0.5]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[tuple[str, int, int]] = set()

    def rank_of(stage: int, microbatch: int) -> int:
        return num_ranks - 1 - owner[stage] if microbatch in mirrored else owner[stage]

    while left:
        free = [
            action
            for action in left
            if all(
                (kind, stage, microbatch) in done
                or (
                    may_deadlock and rank_of(stage, microbatch) != rank_of(action.stage, microbatch)
                )
                for kind, stage, microbatch in _needs(action, num_stages)
            )
        ]
        action = rng.choice(free)
        left.remove(action)
        kind = "B" if action.kind is ActionKind.BW else action.kind.value
        done.add((kind, action.stage, action.microbatch))
        rows[rank_of(action.stage, action.microbatch)].append(action)
    return Schedule(
        name="random",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stage_ranks=owner,
        mirrored=tuple(mirrored),
        actions=tuple(tuple(row) for row in rows),
    )


SEEDS = st.integers(min_value=0, max_value=2**32 - 1)

runnable_schedules = SEEDS.map(listed)
"""Complete schedules that cannot deadlock: any placement, any order, fused and split backward."""

mirrored_schedules = SEEDS.map(lambda seed: listed(seed, mirrors=True))
"""The same, where some microbatches may cross the ranks the other way round."""

ordered_schedules = SEEDS.map(lambda seed: listed(seed, may_deadlock=True))
"""Complete schedules whose ranks keep their own order, but which may deadlock."""


def refused(schedule: Schedule) -> tuple[str, str]:
    """Return the one rule that `schedule` breaks, and what was said."""
    with pytest.raises(InfeasiblePlan) as caught:
        check_schedule(schedule)
    (rule,) = set(caught.value.rules)
    return rule, str(caught.value)
