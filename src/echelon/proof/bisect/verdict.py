# SPDX-License-Identifier: Apache-2.0
"""What a bisection tries, and what it found: the smallest run that fails, and each part's need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from echelon.proof.causes.finding import Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededPart:
    """Name a part of the run without which the failure is gone, and what there is instead."""

    name: str
    without: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Hold the smallest failing run; `num_proofs` were made on the way."""

    rule: str
    """Id of the rule that the run and the smallest one break."""
    needed: tuple[NeededPart, ...]
    """What the failure needs."""
    left_out: tuple[str, ...]
    """Parts of the run that it does not need."""
    sizes: Mapping[str, int]
    """Ranks, blocks, microbatches and steps of the smallest run."""
    files: Mapping[str, str]
    """Text of its run.toml, and of the files that this reads, by name."""
    diagnosis: Diagnosis | None
    """The first wrong thing of it; None where a rank failed instead."""
    summary: str
    """What the smallest run says of itself: the diagnosis, or how a rank failed."""
    num_proofs: int
    """Proofs that were made."""

    def to_json(self) -> dict[str, object]:
        """Return the bisection as one JSON object."""
        return asdict(self)


def halves(number: int, *, least: int = 1) -> list[int]:
    """Return the smaller numbers that halving goes through, the smallest first."""
    found: list[int] = []
    while number // 2 >= least:
        number //= 2
        found.append(number)
    return found[::-1]
