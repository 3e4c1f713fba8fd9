"""Numbers with what is not known of them: seconds and bytes of a plan, and of a difference.

A band is how far predictions were from published runs like the plan (`grounds.py`: four of five lie
inside), or that of `planner/estimate.py` where it is wider: everything hidden behind compute that
can be, or nothing; an allocator that holds back nothing, or twice its usual slack. Both plans of a
difference run under the same trainer on the same devices, so most of what is not known of one is
not known of the other: its band is how far the ratio of two runs of one sweep was off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from echelon.cost.lattice.step import step_seconds
from echelon.planner.estimate import OVERLAPS, Estimate
from echelon.planner.explain.grounds import EXACT, grounds_of, pair_factors
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
    band, (low, high) = estimate.step_band, grounds_of(estimate.work).step
    step = estimate.step_s
    return Banded(value=step, low=min(low * step, band.low), high=max(high * step, band.high))


def held_of(estimate: Estimate) -> Banded:
    """Return the bytes of the fullest rank; those that are counted have no band."""
    band, (low, high) = estimate.bytes_band, grounds_of(estimate.work).held
    counted = sum(estimate.bytes[name] for name in EXACT)
    rest = estimate.bytes_held - counted
    return Banded(
        value=estimate.bytes_held,
        low=min(counted + low * rest, band.low),
        high=max(counted + high * rest, band.high),
    )


def bytes_of(estimate: Estimate) -> tuple[Term, ...]:
    """Return every term of what the fullest rank holds with its band: none where it is counted."""
    low, high = grounds_of(estimate.work).held
    return tuple(
        Term(
            name=name,
            amount=_banded(value) if name in EXACT else _banded(value, low * value, high * value),
        )
        for name, value in estimate.bytes.items()
    )


def mfu_of(estimate: Estimate) -> Banded:
    """Return the share of the devices' peak that the model's FLOPs are."""
    return _rate(estimate.mfu, step_of(estimate))


def tokens_of(estimate: Estimate) -> Banded:
    """Return the tokens of a device in a second."""
    return _rate(estimate.tokens_per_s_per_device, step_of(estimate))


def price_of(estimate: Estimate, price_per_device_hour: float) -> Banded:
    """Return what a million tokens cost."""
    step = step_of(estimate)
    each = estimate.token_price(price_per_device_hour) / step.value
    return Banded(value=each * step.value, low=each * step.low, high=each * step.high)


def terms_of(estimate: Estimate) -> tuple[Term, ...]:
    """Return every term of a step with its band, in the order of the formulas."""
    hidden, shown = _shifted(estimate, 1.0), _shifted(estimate, 0.0)
    low, high = grounds_of(estimate.work).step
    return tuple(
        Term(
            name=name,
            amount=_banded(value, hidden[name], shown[name], low * value, high * value),
        )
        for name, value in estimate.seconds.items()
    )


def difference(first: Estimate, second: Estimate) -> Banded:
    """Return how many seconds longer the step of `second` is, under one trainer on one cluster."""
    ends = [
        factor * second.step_s - first.step_s
        for factor in pair_factors(first.step_s, second.step_s)
    ]
    worlds = [
        sum(_shifted(second, hidden).values()) - sum(_shifted(first, hidden).values())
        for hidden in (1.0, 0.0)
    ]
    return _banded(second.step_s - first.step_s, *worlds, *ends)


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


def _rate(value: float, step: Banded) -> Banded:
    """Return the band of what a step's seconds divide."""
    whole = value * step.value
    return Banded(value=value, low=whole / step.high, high=whole / step.low)


def _banded(value: float, *others: float) -> Banded:
    return Banded(value=value, low=min((value, *others)), high=max((value, *others)))


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
