# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the lists themselves: stages without a rank, cells not run once, bad order.

Each function returns the problems of one kind, and takes for granted that there are none of the
kinds before it. They name what they find: the rank, the place in its list (or the cell of the file
that it came from), and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from echelon.core.errors import Problem
from echelon.core.rulebook.pipeline import (
    SCHEDULE_COVERS_ONCE,
    SCHEDULE_KEEPS_ORDER,
    SCHEDULE_PLACES_STAGES,
)
from echelon.core.rules import Rule
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.dependencies import required_results, result_name
from echelon.schedule.file_rows import NO_FILE, ActionCells

MOST_NAMED = 8  # actions in a message


def placement_problems(schedule: Schedule, cells: ActionCells = NO_FILE) -> list[Problem]:
    """Return stages on ranks that do not exist, and ranks without a stage."""
    return _first_problems(SCHEDULE_PLACES_STAGES, list(_misplaced(schedule, cells)))


def coverage_problems(schedule: Schedule, cells: ActionCells = NO_FILE) -> list[Problem]:
    """Return actions that are missing, doubled, on the wrong rank, or of no stage or microbatch."""
    places: dict[Action, list[tuple[int, int]]] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            places.setdefault(action, []).append((rank, place))
    faults = [*_strays(schedule, cells), *_doubled(places, cells)]
    missing, others = _gaps(schedule, places, cells)
    return _first_problems(SCHEDULE_COVERS_ONCE, [*faults, *missing], others)


def order_problems(schedule: Schedule, cells: ActionCells = NO_FILE) -> list[Problem]:
    """Return actions that stand before something of their own rank that they need."""
    faults: list[Problem] = []
    for rank, row in enumerate(schedule.actions):
        places = {result_name(action): place for place, action in enumerate(row)}
        for place, action in enumerate(row):
            for need in required_results(action, schedule.num_stages):
                made = places.get(need)
                if made is not None and made > place:
                    text = (
                        f"rank {rank}: {action} at {cells.at(rank, place)} needs {row[made]}, "
                        f"which stands at {cells.at(rank, made)}"
                    )
                    suggestions = (f"{action} behind {row[made]}",)
                    where = cells.file_at(rank, place)
                    faults.append(
                        SCHEDULE_KEEPS_ORDER.problem(text, set_by=where, suggestions=suggestions)
                    )
    return _first_problems(SCHEDULE_KEEPS_ORDER, faults)


def _first_problems(rule: Rule, faults: list[Problem], others: int = 0) -> list[Problem]:
    """Return the first few faults, and count the rest and `others` that are like them.

    One fault of a builder repeats for every microbatch.
    """
    more = max(0, len(faults) - MOST_NAMED) + others
    rest = [rule.problem(f"and {more} more of the same kind")] if more else []
    return [*faults[:MOST_NAMED], *rest]


def _misplaced(schedule: Schedule, cells: ActionCells) -> Iterator[Problem]:
    ranks, where = schedule.num_ranks, cells.source
    if ranks < 1 or not schedule.stage_ranks or schedule.num_microbatches < 1:
        yield SCHEDULE_PLACES_STAGES.problem(
            f"{ranks} ranks, {schedule.num_stages} stages and "
            f"{schedule.num_microbatches} microbatches; each must be at least 1",
            set_by=where,
        )
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < ranks:
            text = f"stage {stage} is on rank {rank}, but ranks are 0 to {ranks - 1}"
            yield SCHEDULE_PLACES_STAGES.problem(text, set_by=where)
    wrong = [one for one in schedule.mirrored if not 0 <= one < schedule.num_microbatches]
    if wrong:
        named = ", ".join(map(str, sorted(wrong)))
        yield SCHEDULE_PLACES_STAGES.problem(
            f"mirrored microbatches [{named}] do not exist", set_by=where
        )
    if len(schedule.actions) != ranks:
        text = f"{len(schedule.actions)} lists of actions for {ranks} ranks"
        yield SCHEDULE_PLACES_STAGES.problem(text, set_by=where)
        return
    owners = {rank for stage in range(schedule.num_stages) for rank in schedule.owners_of(stage)}
    for rank in range(ranks):
        if rank not in owners:
            yield SCHEDULE_PLACES_STAGES.problem(
                f"rank {rank} owns no stage", set_by=cells.file_at(rank)
            )


def _strays(schedule: Schedule, cells: ActionCells) -> Iterator[Problem]:
    """Yield actions outside of the stages and microbatches, and those on a rank not theirs."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            at = f"rank {rank}, {cells.at(rank, place)}: {action}"
            where = cells.file_at(rank, place)
            if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
                text = f"{at} is outside of the {stages} stages and {microbatches} microbatches"
                yield SCHEDULE_COVERS_ONCE.problem(text, set_by=where)
            elif (owner := schedule.rank_of(action.stage, action.microbatch)) != rank:
                text = f"{at}, but stage {action.stage} is on rank {owner}"
                if schedule.mirrored:
                    text += f" for microbatch {action.microbatch}"
                yield SCHEDULE_COVERS_ONCE.problem(
                    text, set_by=where, suggestions=(f"{action} on rank {owner}",)
                )


def _doubled(places: dict[Action, list[tuple[int, int]]], cells: ActionCells) -> Iterator[Problem]:
    for action, found in places.items():
        if len(found) > 1:
            named = [f"rank {rank}, {cells.at(rank, place)}" for rank, place in found[:MOST_NAMED]]
            more = " and more" if len(found) > MOST_NAMED else ""
            yield SCHEDULE_COVERS_ONCE.problem(
                f"{action} stands {len(found)} times, not once: {'; '.join(named)}{more}",
                set_by=cells.file_at(*found[1]),
            )


def _gaps(
    schedule: Schedule, actions: Iterable[Action], cells: ActionCells
) -> tuple[list[Problem], int]:
    """Return the first faults in the sets of actions of a (stage, microbatch), and how many more.

    A file may name microbatch 10**9; so what is missing is counted, and only the first are named.
    """
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    kinds: dict[tuple[int, int], set[ActionKind]] = {}
    for action in actions:
        if 0 <= action.stage < stages and 0 <= action.microbatch < microbatches:
            kinds.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    whole = sum(not _cell_fault(stage, microbatch, kinds) for stage, microbatch in kinds)
    wrong = stages * microbatches - whole
    faults: list[Problem] = []
    for stage, microbatch in _all_cells(stages, microbatches):
        if len(faults) == min(wrong, MOST_NAMED):
            break
        if text := _cell_fault(stage, microbatch, kinds):
            rank = schedule.rank_of(stage, microbatch)
            message = f"stage {stage}, microbatch {microbatch}: {text} (rank {rank})"
            faults.append(SCHEDULE_COVERS_ONCE.problem(message, set_by=cells.file_at(rank)))
    return faults, wrong - len(faults)


def _all_cells(stages: int, microbatches: int) -> Iterator[tuple[int, int]]:
    for stage in range(stages):
        for microbatch in range(microbatches):
            yield stage, microbatch


def _cell_fault(stage: int, microbatch: int, found: dict[tuple[int, int], set[ActionKind]]) -> str:
    """Return what is wrong with the set of actions of one cell, or nothing."""
    kinds = found.get((stage, microbatch), set())
    forward, fused = ActionKind.F in kinds, ActionKind.BW in kinds
    split = [kind for kind in (ActionKind.B, ActionKind.W) if kind in kinds]
    if not forward:
        return f"F{stage}.{microbatch} is missing"
    if fused and split:
        return f"BW stands beside {' and '.join(split)}; a cell has one or the other"
    if not fused and not split:
        return "BW (or B and W) is missing"
    if not fused and len(split) == 1:
        return f"{ActionKind.W if ActionKind.B in kinds else ActionKind.B} is missing"
    return ""
