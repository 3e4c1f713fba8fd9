# SPDX-License-Identifier: Apache-2.0
"""What every schedule builder offers: the actions, and the facts that the literature states.

A builder is bound to its numbers (stages, ranks, microbatches), so its facts are plain methods:
``OneFOneB(num_stages=4, num_ranks=4, num_microbatches=8).bubble_fraction()``. The closed forms
hold for stages of equal duration and free transfers; `simulate.py` gives the rest, and equals them
where `idle_s` is exact. With whole numbers for times nothing is rounded before the last division.

`Looped` and `VShaped` place several stages on a rank. Narayanan et al. 2021 (arXiv 2104.04473,
section 2.2.2) call looped ones virtual stages, Lamy-Poirier 2022 (arXiv 2211.05953, section 4) a
looped pipeline: stage s is on rank s % p. In a V (Qi et al., arXiv 2401.10241, section 6) rank r of
p holds stages r and 2p-1-r, so the first and the last stage are on rank 0 (the embedding and the
head that may share its weights, and the loss), and stages p-1 and p are neighbours on one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar

from echelon.schedule.action import Action, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimes:
    """Give the seconds of F, B and W of one microbatch on one stage; BW takes both of its halves.

    The papers' F, B and W; as a default they are equal, which makes the whole backward pass twice
    the forward pass.
    """

    forward_s: float = 1
    input_gradient_s: float = 1
    weight_gradient_s: float = 1

    @property
    def backward_s(self) -> float:
        """Return the seconds of the whole backward pass."""
        return self.input_gradient_s + self.weight_gradient_s

    @property
    def total_s(self) -> float:
        """Return the seconds of one microbatch on one stage, forward and backward."""
        return self.forward_s + self.backward_s


EQUAL_TIMES = ActionTimes()
"""F = B = W, as the zero-bubble papers draw it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder(ABC):
    """Build one kind of schedule and state its bubble and its peak activation memory."""

    name: ClassVar[str]
    paper: ClassVar[str]
    places: ClassVar[str] = "one stage on each pipeline rank"
    """Where the stages lie, in words."""
    default_virtual_stages: ClassVar[int] = 1
    """The stages per rank if nobody says."""
    microbatches_per_rank: ClassVar[int] = 1
    """The fewest microbatches over the ranks; 0: any number will do."""
    microbatch_multiple: ClassVar[int] = 1
    """What the number of microbatches must be a multiple of."""
    suits: ClassVar[str] = ""
    """When it is the one to take, in words."""
    closed_forms: ClassVar[str] = "echelon.cost.inputs.pipeline:ONE_F_ONE_B"
    """Its `ClosedForms` for arrays of plans; those of 1F1B where it has none of its own."""
    stage_copies: ClassVar[int] = 1
    """The stages of which each pipeline rank holds the weights, virtual stages counted as one."""
    ends_on_first_rank: ClassVar[bool] = False
    """Whether the first rank has the last stage too, and so the embedding and the head."""
    is_searched: ClassVar[bool] = True
    """Whether a search tries it where it is not asked for."""
    is_suggested: ClassVar[bool] = True
    """Whether a plan with another schedule is compared with this one."""
    short_name: ClassVar[str] = ""
    """What stands before the number of virtual stages in tables of plans; nothing: its name."""
    tool_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Its names in other tools, by the names of the tools."""

    num_stages: int
    num_ranks: int
    num_microbatches: int

    @classmethod
    def minimum_microbatches(cls, num_ranks: int) -> int:
        """Return the fewest microbatches with which this schedule is worth its name."""
        return max(1, cls.microbatches_per_rank * num_ranks)

    @classmethod
    def allows_microbatches(cls, num_ranks: int, num_microbatches: int) -> bool:
        """Return whether this schedule can be built for so many microbatches."""
        enough = num_microbatches >= cls.minimum_microbatches(num_ranks)
        return enough and num_microbatches % cls.microbatch_multiple == 0

    @classmethod
    def outdone_from(cls, num_ranks: int) -> int | None:
        """Return from how many microbatches on 1F1B waits no longer and holds less."""
        del num_ranks
        return None

    @classmethod
    def fits_stages(cls, num_stages: int, num_ranks: int) -> bool:
        """Return whether this schedule can place `num_stages` on `num_ranks`."""
        return cls.fits_ranks(num_ranks) and cls.fits_virtual_stages(
            num_stages // num_ranks if num_stages % num_ranks == 0 else 0
        )

    @classmethod
    def fits_ranks(cls, num_ranks: int) -> bool:
        """Return whether this schedule can run on so many ranks."""
        return num_ranks >= 1

    @classmethod
    def fits_virtual_stages(cls, virtual_stages: int) -> bool:
        """Return whether each rank may hold so many stages: one."""
        return virtual_stages == 1

    @classmethod
    def stages_for(cls, num_ranks: int, virtual_stages: int) -> int:
        """Return how many stages `virtual_stages` stages per rank make."""
        return num_ranks * virtual_stages

    @classmethod
    def owners(cls, num_stages: int, num_ranks: int) -> tuple[int, ...]:
        """Return the rank that owns each stage: stage `s` on rank `s % num_ranks`."""
        return tuple(stage % num_ranks for stage in range(num_stages))

    def stage_ranks(self) -> tuple[int, ...]:
        """Return the rank that owns each stage."""
        return self.owners(self.num_stages, self.num_ranks)

    def mirrored(self) -> tuple[int, ...]:
        """Return the microbatches that cross the ranks the other way round: none."""
        return ()

    @abstractmethod
    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return what `rank` runs in one step, in order."""

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+BW): the overhead is (p-1)/m, the fraction of the step (p-1)/(m+p-1)."""
        # A rank waits so long between the first start and the last end of the step; all ranks do.
        return (self.num_ranks - 1) * times.total_s

    def busy_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return how long each rank computes in a step."""
        return self.num_microbatches * self.num_stages // self.num_ranks * times.total_s

    def bubble_overhead(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return the idle time of a rank over its busy time (Narayanan et al. 2021)."""
        return self.idle_s(times) / self.busy_s(times)

    def bubble_fraction(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return the idle time of a rank over the time of the whole step (GPipe's definition)."""
        idle = self.idle_s(times)
        return idle / (idle + self.busy_s(times))

    @abstractmethod
    def peak_in_flight(self, stage: int) -> int:
        """Return the most microbatches whose activations a rank holds of `stage` at once."""

    def peak_in_flight_of_rank(self, rank: int) -> int:
        """Return the most (stage, microbatch) pairs whose activations `rank` holds at once."""
        return self.peak_in_flight(rank)

    def num_messages(self) -> int:
        """Return how many messages cross ranks in a step: 2 m per boundary between ranks."""
        owners = self.stage_ranks()
        crossings = sum(a != b for a, b in pairwise(owners))
        return 2 * self.num_microbatches * crossings

    def placement(self) -> Schedule:
        """Return where stages and microbatches lie: the schedule without any action."""
        return Schedule(
            name=self.name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            stage_ranks=self.stage_ranks(),
            actions=(),
            mirrored=self.mirrored(),
        )

    def schedule(self) -> Schedule:
        """Return the schedule itself."""
        rows = tuple(self.rank_actions(rank) for rank in range(self.num_ranks))
        return replace(self.placement(), actions=rows)


class Looped(Builder):
    """Build a schedule whose ranks hold two or more stages each, in turn.

    Fewer than p microbatches come back to rank 0 before the last rank has seen the first of them.
    """

    places = "two or more stages on each pipeline rank, stage s on rank s % num_ranks"
    default_virtual_stages = 2

    @classmethod
    def fits_virtual_stages(cls, virtual_stages: int) -> bool:
        """Return whether each rank holds several stages; with one it would be 1F1B or GPipe."""
        return virtual_stages >= 2

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+BW) of one stage: the overhead is (p-1)/(v m)."""
        return super().idle_s(times)


class VShaped(Builder):
    """Place two stages on each rank in the shape of a V."""

    places = "two stages on each pipeline rank, rank r having stages r and 2 x num_ranks - 1 - r"
    default_virtual_stages = 2

    @classmethod
    def fits_virtual_stages(cls, virtual_stages: int) -> bool:
        """Return whether each rank holds two stages."""
        return virtual_stages == 2

    @classmethod
    def owners(cls, num_stages: int, num_ranks: int) -> tuple[int, ...]:
        """Return the rank that owns each stage: 0 to p-1, and back."""
        return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
