# SPDX-License-Identifier: Apache-2.0
"""A mesh whose axes have the user's names: ranks, coordinates, groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class NamedMesh:
    """Hold the degrees of the axes by name, outermost first."""

    degrees: Mapping[str, int]

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes that split anything."""
        return tuple(axis for axis, degree in self.degrees.items() if degree > 1)

    def __str__(self) -> str:
        """Return the mesh as users read it."""
        return " x ".join(f"{axis}{self.degrees[axis]}" for axis in self.axes) or "1"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank is on each axis; the last axis varies fastest."""
        found: dict[str, int] = {}
        for axis in reversed(tuple(self.degrees)):
            rank, found[axis] = divmod(rank, self.degrees[axis])
        return {axis: found[axis] for axis in self.degrees}

    def label(self, rank: int) -> str:
        """Return the coordinates of a rank as text."""
        here = self.coordinates(rank)
        return " ".join(f"{axis}{here[axis]}" for axis in self.axes)

    def degree(self, axes: Sequence[str]) -> int:
        """Return the number of ranks along several axes together."""
        return math.prod(self.degrees[axis] for axis in axes)

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Return the place of a rank along several axes together, the last one fastest."""
        here, place = self.coordinates(rank), 0
        for axis in axes:
            place = place * self.degrees[axis] + here[axis]
        return place

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` in these axes only, in rising order."""
        here = self.coordinates(rank)
        fixed = {axis: place for axis, place in here.items() if axis not in axes}
        return tuple(
            other
            for other in range(self.world_size)
            if all(self.coordinates(other)[axis] == place for axis, place in fixed.items())
        )

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks along these axes."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in range(self.world_size)))

    def axis_sets(self) -> Iterator[tuple[str, ...]]:
        """Yield every set of axes that split anything, small ones first."""
        for count in range(1, len(self.axes) + 1):
            yield from combinations(self.axes, count)
