"""Schedules with something changed, and a judge who says by brute force whether they still run.

The judge shares no code with the checker: it counts what stands in the rows, then lets all ranks
run until nobody moves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from echelon.schedule.action import Action, ActionKind, Schedule
from tests.schedule.examples import SEEDS, listed

Rows = list[list[Action]]


def is_valid(schedule: Schedule, limits: Sequence[int] | None = None) -> bool:
    """Return whether every action is there once, where it belongs, and all ranks finish in time."""
    p, m = schedule.num_ranks, schedule.num_microbatches
    owners = schedule.stage_ranks
    if not (p > 0 and m > 0 and owners and len(schedule.actions) == p):
        return False
    if not {*owners} <= {*range(p)} or not {*schedule.mirrored} <= {*range(m)}:
        return False
    if {*owners} | {p - 1 - r for r in owners if schedule.mirrored} != {*range(p)}:
        return False
    found: dict[tuple[int, int], list[str]] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.stage >= len(owners) or action.microbatch >= m:
                return False
            owner = owners[action.stage]
            if rank != (p - 1 - owner if action.microbatch in schedule.mirrored else owner):
                return False
            found.setdefault((action.stage, action.microbatch), []).append(action.kind.value)
    whole = (["BW", "F"], ["B", "F", "W"])
    if len(found) != m * len(owners) or any(sorted(kinds) not in whole for kinds in found.values()):
        return False
    return _all_finish(schedule) and all(
        _most_held(row) <= limit for row, limit in zip(schedule.actions, limits or [], strict=False)
    )


def _all_finish(schedule: Schedule) -> bool:
    done: set[tuple[str, int, int]] = set()
    left = [list(row) for row in schedule.actions]
    moved = True
    while moved:
        moved = False
        for row in left:
            while row and _may_run(row[0], done, len(schedule.stage_ranks) - 1):
                action = row.pop(0)
                done.add((action.kind.value, action.stage, action.microbatch))
                moved = True
    return not any(left)


def _may_run(action: Action, done: set[tuple[str, int, int]], last: int) -> bool:
    kind, s, m = action.kind.value, action.stage, action.microbatch
    if kind == "F":
        return s == 0 or ("F", s - 1, m) in done
    if kind == "W":
        return ("B", s, m) in done
    after = s == last or ("B", s + 1, m) in done or ("BW", s + 1, m) in done
    return ("F", s, m) in done and after


def _most_held(row: Sequence[Action]) -> int:
    held: set[tuple[int, int]] = set()
    most = 0
    for action in row:
        if action.kind is ActionKind.F:
            held.add((action.stage, action.microbatch))
        most = max(most, len(held))
        if action.kind in (ActionKind.BW, ActionKind.W):
            held.discard((action.stage, action.microbatch))
    return most


def limits_of(schedule: Schedule, rng: random.Random) -> tuple[int, ...]:
    """Return a limit per rank, at, over or under what it holds."""
    return tuple(max(0, _most_held(row) + rng.choice((0, 0, 1, 5, -1))) for row in schedule.actions)


def _place(rows: Rows, rng: random.Random) -> tuple[list[Action], int]:
    row = rng.choice([row for row in rows if row] or [[Action(ActionKind.F, 0, 0)]])
    return row, rng.randrange(len(row))


def drop(rows: Rows, rng: random.Random) -> None:
    """Leave one action out."""
    row, i = _place(rows, rng)
    del row[i]


def double(rows: Rows, rng: random.Random) -> None:
    """Put an action a second time, anywhere."""
    row, i = _place(rows, rng)
    target = rng.choice(rows)
    target.insert(rng.randint(0, len(target)), row[i])


def swap(rows: Rows, rng: random.Random) -> None:
    """Exchange two actions of a rank."""
    row, i = _place(rows, rng)
    k = rng.randrange(len(row))
    row[i], row[k] = row[k], row[i]


def move(rows: Rows, rng: random.Random) -> None:
    """Put an action on another place, mostly of another rank."""
    row, i = _place(rows, rng)
    action = row.pop(i)
    target = rng.choice(rows)
    target.insert(rng.randint(0, len(target)), action)


def reverse(rows: Rows, rng: random.Random) -> None:
    """Turn a part of a row around: ranks then wait for one another."""
    row, i = _place(rows, rng)
    k = rng.randint(i, len(row))
    row[i:k] = row[i:k][::-1]


def serialize(rows: Rows, rng: random.Random) -> None:
    """Run one microbatch after the other on a rank: its own order holds, others may wait."""
    row, _ = _place(rows, rng)
    sign = rng.choice((-1, 1))
    row.sort(key=lambda action: sign * action.microbatch)


def delay(rows: Rows, rng: random.Random) -> None:
    """Let one action come last on its rank."""
    row, i = _place(rows, rng)
    row.append(row.pop(i))


def renumber(rows: Rows, rng: random.Random) -> None:
    """Let an action be of another stage or microbatch, one that does not exist maybe."""
    row, i = _place(rows, rng)
    if rng.random() < 0.5:
        row[i] = replace(row[i], stage=rng.randint(0, 13))
    else:
        row[i] = replace(row[i], microbatch=rng.randint(0, 6))


def rekind(rows: Rows, rng: random.Random) -> None:
    """Let an action be of another kind: B without W, BW beside B."""
    row, i = _place(rows, rng)
    row[i] = replace(row[i], kind=rng.choice(tuple(ActionKind)))


MUTATIONS: tuple[Callable[[Rows, random.Random], None], ...] = (
    *(drop, double, swap, move),
    *(reverse, serialize, delay, renumber, rekind),
)


def mutated(seed: int) -> Schedule:
    """Return a random schedule with nothing, one thing or two things changed."""
    rng = random.Random(seed)
    schedule = listed(rng.randrange(2**32), mirrors=rng.random() < 0.3)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        if not schedule.actions or rng.random() < 0.15:
            schedule = _replaced(schedule, rng)
            continue
        rows = [list(row) for row in schedule.actions]
        rng.choice(MUTATIONS)(rows, rng)
        schedule = replace(schedule, actions=tuple(tuple(row) for row in rows))
    return schedule


def _replaced(schedule: Schedule, rng: random.Random) -> Schedule:
    """Change what is said of the rows instead of the rows."""
    microbatches = schedule.num_microbatches
    stages = list(schedule.stage_ranks)
    stages[rng.randrange(len(stages))] = rng.randint(-1, schedule.num_ranks)
    return rng.choice(
        (
            replace(schedule, num_ranks=max(0, schedule.num_ranks + rng.choice((-1, 1)))),
            replace(schedule, num_microbatches=max(0, microbatches + rng.choice((-1, 1)))),
            replace(schedule, stage_ranks=tuple(stages)),
            replace(schedule, stage_ranks=(*schedule.stage_ranks, 0)),
            replace(schedule, mirrored=(rng.randint(0, microbatches),)),
            replace(schedule, actions=schedule.actions[:-1]),
            replace(schedule, actions=(*schedule.actions, ())),
        )
    )


mutated_schedules = SEEDS.map(mutated)
"""Schedules of which some run, and the others are wrong in every way that there is."""
