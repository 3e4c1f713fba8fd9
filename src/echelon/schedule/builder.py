"""What every schedule builder offers: the actions, and the facts that the literature states.

A builder is bound to its numbers (stages, ranks, microbatches), so its facts are plain methods:
``OneFOneB(num_stages=4, num_ranks=4, num_microbatches=8).bubble_fraction()``. The closed forms
hold for stages of equal duration and free transfers; `simulate.py` gives the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from echelon.schedule.action import Action, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder(ABC):
    """Build one kind of schedule and state its bubble and its peak activation memory."""

    name: ClassVar[str]
    paper: ClassVar[str]

    num_stages: int
    num_ranks: int
    num_microbatches: int

    @classmethod
    @abstractmethod
    def minimum_microbatches(cls, num_stages: int) -> int:
        """Return the fewest microbatches with which this schedule is worth its name."""

    @classmethod
    def fits_stages(cls, num_stages: int, num_ranks: int) -> bool:
        """Return whether this schedule can place `num_stages` on `num_ranks`: one on each."""
        return num_stages == num_ranks >= 1

    def stage_ranks(self) -> tuple[int, ...]:
        """Return the rank that owns each stage: stage `s` on rank `s % num_ranks`."""
        return tuple(stage % self.num_ranks for stage in range(self.num_stages))

    @abstractmethod
    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return what `rank` runs in one step, in order."""

    @abstractmethod
    def bubble_overhead(self) -> float:
        """Return the idle time of a rank over its busy time (Narayanan et al. 2021)."""

    def bubble_fraction(self) -> float:
        """Return the idle time of a rank over the time of the whole step (GPipe's definition)."""
        overhead = self.bubble_overhead()
        return overhead / (1 + overhead)

    @abstractmethod
    def peak_in_flight(self, stage: int) -> int:
        """Return the most microbatches whose activations `stage` holds at once."""

    def schedule(self) -> Schedule:
        """Return the schedule itself."""
        return Schedule(
            name=self.name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            stage_ranks=self.stage_ranks(),
            actions=tuple(self.rank_actions(rank) for rank in range(self.num_ranks)),
        )
