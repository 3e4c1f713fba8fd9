"""Numbers with what is not known of them: seconds and bytes of a plan, and of a difference.

A band is that of `planner/estimate.py`: everything hidden behind compute that can be, or nothing;
an allocator that holds back nothing, or twice its usual slack. Both plans of a difference run under
the same trainer, so a difference is taken within each of these worlds, and its band is narrower
than the bands of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from echelon.cost.lattice.step import step_seconds
from echelon.planner.estimate import OVERLAPS, Estimate
from echelon.planner.simulated import COMPUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Banded:
    """Hold a number with the least and the most that it can be."""

    value: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Return whether all of the band is on one side of zero."""
        return self.low > 0.0 or self.high < 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Name a term of a step, or of what is held, with what it takes."""

    name: str
    amount: Banded


def step_of(estimate: Estimate) -> Banded:
    """Return the seconds of a step."""
    band = estimate.step_band
    return Banded(value=estimate.step_s, low=band.low, high=band.high)


def held_of(estimate: Estimate) -> Banded:
    """Return the bytes of the fullest rank."""
    band = estimate.bytes_band
    return Banded(value=estimate.bytes_held, low=band.low, high=band.high)


def mfu_of(estimate: Estimate) -> Banded:
    """Return the share of the devices' peak that the model's FLOPs are."""
    band, ideal = estimate.step_band, estimate.mfu * estimate.step_s
    return Banded(value=estimate.mfu, low=ideal / band.high, high=ideal / band.low)


def terms_of(estimate: Estimate) -> tuple[Term, ...]:
    """Return every term of a step with its band, in the order of the formulas."""
    hidden, shown = _shifted(estimate, 1.0), _shifted(estimate, 0.0)
    return tuple(
        Term(name=name, amount=_banded(value, hidden[name], shown[name]))
        for name, value in estimate.seconds.items()
    )


def difference(first: Estimate, second: Estimate) -> Banded:
    """Return how many seconds longer the step of `second` is."""
    worlds = [
        sum(_shifted(second, hidden).values()) - sum(_shifted(first, hidden).values())
        for hidden in (1.0, 0.0)
    ]
    return _banded(second.step_s - first.step_s, *worlds)


def term_differences(first: Estimate, second: Estimate) -> tuple[Term, ...]:
    """Return how many seconds longer each term of `second` is, the largest change first.

    Where events say that a step is shorter than by its closed form, stages are cut more evenly: it
    is the head that costs less.
    """
    now, *others = [(_settled(first, h), _settled(second, h)) for h in (None, 1.0, 0.0)]
    found = [
        Term(
            name=name,
            amount=_banded(now[1][name] - now[0][name], *(b[name] - a[name] for a, b in others)),
        )
        for name in first.seconds
    ]
    return tuple(sorted(found, key=lambda term: -abs(term.amount.value)))


def byte_differences(first: Estimate, second: Estimate) -> tuple[tuple[str, float], ...]:
    """Return how many bytes more each term of `second` holds, what grew most first."""
    found = [(name, second.bytes[name] - held) for name, held in first.bytes.items()]
    return tuple(sorted(found, key=lambda item: -item[1]))


def _banded(value: float, *others: float) -> Banded:
    return Banded(value=value, low=min(value, *others), high=max(value, *others))


def _settled(estimate: Estimate, hidden: float | None) -> Mapping[str, float]:
    """Return the terms, those of compute as the closed form has them but for the head.

    Blocks that make room for the head save what events say to be less.
    """
    found = dict(estimate.seconds if hidden is None else _shifted(estimate, hidden))
    closed = step_seconds(estimate.work).terms
    saved = 0.0
    for name in COMPUTED:
        alone = float(np.sum(np.asarray(closed[name])))
        saved += alone - estimate.seconds[name]
        found[name] += alone - estimate.seconds[name]
    of_head = min(saved, found["head"])
    found["head"] -= of_head
    found["bubble"] -= saved - of_head
    return found


def _shifted(estimate: Estimate, hidden: float) -> Mapping[str, float]:
    """Return the terms with so much hidden as can be (1), or nothing (0).

    What events said stays: the closed form says only by how much a term changes.
    """
    work = estimate.work
    software = replace(work.software, **dict.fromkeys(OVERLAPS, hidden))
    other = step_seconds(replace(work, software=software)).terms
    closed = step_seconds(work).terms
    return {
        name: value + float(np.sum(np.asarray(other[name]) - np.asarray(closed[name])))
        for name, value in estimate.seconds.items()
    }
