"""What formulas of a lattice come out with: terms that add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.cost.lattice.numbers import Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Give the seconds of a step, or the bytes of the fullest rank, by term."""

    terms: Mapping[str, Num]

    @property
    def total(self) -> Num:
        """Return the sum."""
        whole: Num = 0.0
        for part in self.terms.values():
            whole = whole + part
        return whole
