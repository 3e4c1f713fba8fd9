"""Where the positions of a sequence live: how context parallelism cuts it over `cp` ranks.

`cp = ulysses_degree x ring_degree`; the ranks of one Ulysses group are neighbours (fast links), so
context rank c is place ``c % ulysses_degree`` in its Ulysses group, and ``c // ulysses_degree`` on
its ring. Each place of a ring holds a part of the positions, each member of a Ulysses group an
equal piece of its part:

    contiguous   place i holds the i-th of `ring_degree` chunks
    zigzag       place i holds chunks i and 2n - 1 - i of 2n (Brandon et al., "Striped Attention",
                 2023, compares; Grattafiori et al., "Llama 3", 2024, section 3.3.2): the work of a
                 causal mask is the same everywhere
    striped      place i holds positions i, i + n, i + 2n, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.core.attention_mask import Run, cut_runs

PlacementKind = Literal["contiguous", "zigzag", "striped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Say which positions each context rank holds, in the order in which it holds them."""

    kind: PlacementKind
    ring_degree: int
    ulysses_degree: int
    length: int

    @property
    def degree(self) -> int:
        """Return the number of context ranks."""
        return self.ring_degree * self.ulysses_degree

    def ring_place(self, cp_rank: int) -> int:
        """Return the place of a context rank on its ring."""
        return cp_rank // self.ulysses_degree

    def ring_runs(self, place: int) -> tuple[Run, ...]:
        """Return the positions of one place of a ring, in runs."""
        n = self.ring_degree
        if self.kind == "striped":
            return (Run(place, n, self.length // n),)
        if self.kind == "contiguous" or n == 1:
            size = self.length // n
            return (Run(place * size, 1, size),)
        half = self.length // (2 * n)
        return (Run(place * half, 1, half), Run((2 * n - 1 - place) * half, 1, half))

    def runs(self, cp_rank: int) -> tuple[Run, ...]:
        """Return the positions of one context rank, in runs."""
        place, member = divmod(cp_rank, self.ulysses_degree)
        size = self.length // self.degree
        return cut_runs(self.ring_runs(place), member * size, (member + 1) * size)

    def positions(self, cp_rank: int) -> list[int]:
        """Return the positions of one context rank, in order."""
        return [run.position(i) for run in self.runs(cp_rank) for i in range(run.count)]
