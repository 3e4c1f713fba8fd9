# SPDX-License-Identifier: Apache-2.0
"""Who owns a stage, read from where its actions stand: for schedules that are written as rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from echelon.schedule.action import Action, Schedule

Votes = Mapping[tuple[int, int], Counter[int]]
"""Per (stage, microbatch), how many of its actions stand on each rank."""

_NONE: frozenset[int] = frozenset()


def schedule_from_actions(name: str, actions: Sequence[Sequence[Action]]) -> Schedule:
    """Return the schedule whose ranks run `actions`; stage owners follow from the rows.

    A stage is on the rank that has most of its actions, so that one astray is the odd one. Where it
    fits better, some microbatches are mirrored; the first is not. `check_schedule` says whether
    every action stands where it should. A stage that no row names is put on rank 0, where the
    checker misses its actions.
    """
    num_ranks = len(actions)
    stages = 1 + max((action.stage for row in actions for action in row), default=-1)
    microbatches = 1 + max((action.microbatch for row in actions for action in row), default=-1)
    votes = _votes(actions)
    plain = _owners(votes, stages, num_ranks, mirrored=_NONE)
    mirrored = _mirrored(votes, _owners_of_first(votes, plain), num_ranks)
    folded = _owners(votes, stages, num_ranks, mirrored=mirrored)
    if _num_misplaced(votes, folded, num_ranks, mirrored) >= _num_misplaced(
        votes, plain, num_ranks, _NONE
    ):
        folded, mirrored = plain, _NONE
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_microbatches=microbatches,
        stage_ranks=folded,
        mirrored=tuple(sorted(mirrored)),
        actions=tuple(tuple(row) for row in actions),
    )


def _votes(actions: Sequence[Sequence[Action]]) -> Votes:
    votes: dict[tuple[int, int], Counter[int]] = {}
    for rank, row in enumerate(actions):
        for action in row:
            votes.setdefault((action.stage, action.microbatch), Counter())[rank] += 1
    return votes


def _owners(
    votes: Votes, num_stages: int, num_ranks: int, *, mirrored: frozenset[int]
) -> tuple[int, ...]:
    """Return the rank that has most actions of each stage, those of `mirrored` seen in a mirror."""
    owners: dict[int, Counter[int]] = {}
    for (stage, microbatch), found in sorted(votes.items()):
        total = owners.setdefault(stage, Counter())
        for rank, count in found.items():
            total[num_ranks - 1 - rank if microbatch in mirrored else rank] += count
    return tuple(
        owners[stage].most_common(1)[0][0] if stage in owners else 0 for stage in range(num_stages)
    )


def _owners_of_first(votes: Votes, plain: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the first microbatch crosses each stage; `plain` where it does not."""
    first = min((microbatch for _, microbatch in votes), default=0)
    return tuple(
        votes[stage, first].most_common(1)[0][0] if (stage, first) in votes else rank
        for stage, rank in enumerate(plain)
    )


def _mirrored(votes: Votes, owners: tuple[int, ...], num_ranks: int) -> frozenset[int]:
    """Return the microbatches that have more actions on the mirrored ranks than on `owners`."""
    balance: Counter[int] = Counter()
    for (stage, microbatch), found in votes.items():
        rank = owners[stage]
        balance[microbatch] += found[num_ranks - 1 - rank] - found[rank]
    return frozenset(microbatch for microbatch, more in balance.items() if more > 0)


def _num_misplaced(
    votes: Votes, owners: tuple[int, ...], num_ranks: int, mirrored: frozenset[int]
) -> int:
    """Count the actions that do not stand where `owners` and `mirrored` say."""
    return sum(
        found.total() - found[num_ranks - 1 - owners[stage] if m in mirrored else owners[stage]]
        for (stage, m), found in votes.items()
    )
