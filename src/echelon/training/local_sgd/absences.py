# SPDX-License-Identifier: Apache-2.0
"""Which rounds an island missed that was lost: what it moved in them counts nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.choices.local_sgd import IslandChange


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentIsland:
    """Say that an island was lost, and what that left out."""

    island: int
    """The island."""
    cause: str
    """How it was lost."""
    first_step: int
    """The first step, from 1, of which nothing that it did counts."""
    last_step: int
    """The last one; less than the first where it missed none."""
    first_round: int
    """The first round, from 1, whose end it was not at."""
    last_round: int
    """The last one."""
    first_row: int
    """The first row, from 0, of each of their global batches that it would have read."""
    last_row: int
    """The last one."""
    returned: bool
    """Whether it came back."""

    @property
    def num_steps(self) -> int:
        """Return how many steps it missed."""
        return max(0, self.last_step - self.first_step + 1)

    @property
    def num_sequences(self) -> int:
        """Return how many sequences count nowhere."""
        return self.num_steps * (self.last_row - self.first_row + 1)

    def says(self) -> str:
        """Return what became of it."""
        then = f"back with step {self.last_step + 1}" if self.returned else "not back"
        if not self.num_steps:
            return f"island {self.island}: {self.cause}; {then}, no round missed"
        first, last = self.first_round, self.last_round
        rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
        return (
            f"island {self.island}: {self.cause}; {then}; it missed {rounds}: its "
            f"{self.num_sequences} sequences of steps {self.first_step} to {self.last_step} (rows "
            f"{self.first_row} to {self.last_row} of each batch) count nowhere"
        )


def absent_islands(
    changes: Sequence[IslandChange], steps: int, *, every: int, share: int
) -> Sequence[AbsentIsland]:
    """Return the absences in a run of `steps` steps in rounds of `every`, in the order of losses.

    `share` are the rows of each global batch that an island reads.
    """
    found: list[AbsentIsland] = []
    away: dict[int, IslandChange] = {}

    def ends(lost: IslandChange, until: int, *, returned: bool) -> None:
        found.append(
            AbsentIsland(
                island=lost.island,
                cause=lost.cause,
                first_step=lost.step + 1,
                last_step=until,
                first_round=lost.step // every + 1,
                last_round=until // every,
                first_row=lost.island * share,
                last_row=(lost.island + 1) * share - 1,
                returned=returned,
            )
        )

    for one in changes:
        if not one.there:
            away[one.island] = one
        elif one.island in away:
            ends(away.pop(one.island), one.step, returned=True)
    for lost in away.values():
        ends(lost, steps, returned=False)
    return sorted(found, key=lambda one: (one.first_step, one.island))


def news_of(changes: Sequence[IslandChange]) -> Sequence[str]:
    """Return what to tell of changes."""
    return [
        f"island {one.island} is back, and begins with step {one.step + 1}"
        if one.there
        else f"island {one.island} is lost: what it did after step {one.step} counts nowhere: "
        f"{one.cause}"
        for one in changes
    ]
