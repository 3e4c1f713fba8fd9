# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is made of: steps, in each of which a member sends and receives elements.

Steps are plain numbers, so their bytes and their sums can be checked without a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.core.choices.collective_algorithms import COLLECTIVE_ALGORITHMS
from echelon.core.choices.registry import load_reference
from echelon.cost.bytes.all_reduce import SumGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Say which member of a group this is; `per_node` of its members are on each node."""

    place: int
    size: int
    per_node: int


@dataclass(frozen=True, slots=True)
class Part:
    """Name the elements from `start` to `stop` of a flat tensor."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Return how many elements it has."""
        return self.stop - self.start

    def chunk(self, index: int, count: int) -> Part:
        """Return chunk `index` (modulo `count`) of `count`, as equal as whole elements allow."""
        index %= count
        first = self.start + index * self.length // count
        return Part(first, self.start + (index + 1) * self.length // count)

    def chunks(self, count: int) -> tuple[Part, ...]:
        """Return all of `count` chunks, in order."""
        return tuple(self.chunk(index, count) for index in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Hold what goes to and comes from other members, by their places, all of it at once.

    What comes is added to what is there where `adds`, in this order, and replaces it otherwise.
    """

    sends: tuple[tuple[int, Part], ...] = ()
    receives: tuple[tuple[int, Part], ...] = ()
    adds: bool = False


StepMaker = Callable[[Member, int], tuple[Step, ...]]
"""Member and number of elements -> its steps."""


def steps_of(sums: SumGroup, num_elements: int) -> tuple[Step, ...]:
    """Return the steps by which this member of a group sums so many elements."""
    return _made(COLLECTIVE_ALGORITHMS[sums.algorithm].runner, sums, num_elements)


def scatter_steps_of(sums: SumGroup, num_elements: int) -> tuple[Step, ...]:
    """Return the steps after which member i owns slice i of a sum, of n equal slices."""
    return _made(COLLECTIVE_ALGORITHMS[sums.algorithm].scatter_runner, sums, num_elements)


def gather_steps_of(sums: SumGroup, num_elements: int) -> tuple[Step, ...]:
    """Return the steps by which all get the n equal slices, of which member i has slice i."""
    return _made(COLLECTIVE_ALGORITHMS[sums.algorithm].gather_runner, sums, num_elements)


def _made(runner: str, sums: SumGroup, num_elements: int) -> tuple[Step, ...]:
    make: StepMaker = load_reference(runner)
    return make(Member(place=sums.place, size=sums.size, per_node=sums.per_node), num_elements)
