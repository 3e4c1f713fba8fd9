# SPDX-License-Identifier: Apache-2.0
"""A mixture of sources: weights that hold until a step, and the places that they are rounded to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIXTURE_PLACES = 2**16  # places of the pattern that sequences follow


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """Give a source a weight, until a step or to the end.

    `path` is what `data.source` takes; `until_step` is the first step, counted from 0, for which
    the weight does not hold any more; None: it holds to the end.
    """

    path: str
    weight: float
    until_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePhase:
    """Hold the weight of every source (0: none of it) until a step; None: to the end."""

    until_step: int | None
    weights: tuple[float, ...]


def sources_of(parts: Sequence[MixturePart]) -> tuple[str, ...]:
    """Return the sources of a mixture, each once, in the order in which they are named."""
    return tuple(dict.fromkeys(part.path for part in parts))


def phases_of(parts: Sequence[MixturePart]) -> tuple[MixturePhase, ...]:
    """Return the phases of a mixture in their order; a source without a weight in one has 0."""
    sources = sources_of(parts)
    ends = {part.until_step for part in parts}
    last: tuple[None, ...] = (None,) if None in ends else ()
    ordered = (*sorted(end for end in ends if end is not None), *last)
    found: list[MixturePhase] = []
    for end in ordered:
        given = {part.path: float(part.weight) for part in parts if part.until_step == end}
        weights = tuple(given.get(source, 0.0) for source in sources)
        found.append(MixturePhase(until_step=end, weights=weights))
    return tuple(found)


def places_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many places of the pattern each weight has; the largest remainders round up."""
    total = sum(weights)
    exact = [MIXTURE_PLACES * weight / total for weight in weights]
    places = [int(one) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda s: (places[s] - exact[s], s))
    for source in by_remainder[: MIXTURE_PLACES - sum(places)]:
        places[source] += 1
    return tuple(places)
