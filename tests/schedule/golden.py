"""Facts about pipelines that tutorials state, as they were checked by hand, and what ours give.

Each has the id under which it was checked; `correct` is what holds (a tutorial may have said
something else). Shares are rounded to four digits there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.schedule.build import builder_of
from echelon.schedule.builders.builder import Builder
from echelon.schedule.check import check_schedule
from tests.schedule.closed_forms import simulated, times_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Hold one checked fact and the function that must give it."""

    id: str
    claim: str
    correct: object
    ours: Callable[[], object]


ONE, TWO = times_of(2, 1, 1), times_of(1, 1, 1)
"""A backward pass as long as the forward pass, and twice as long."""


def _of(name: str, p: int, m: int) -> Builder:
    return builder_of(name, num_stages=p, num_ranks=p, num_microbatches=m)


def _fraction(name: str, p: int, m: int) -> float:
    """Return the bubble fraction, on which both times and the closed form must agree."""
    builder = _of(name, p, m)
    (share,) = {
        builder.bubble_fraction(),
        *(simulated(builder, times).bubble_fraction for times in (ONE, TWO)),
    }
    return share


def _overhead(name: str, p: int, m: int) -> float:
    builder = _of(name, p, m)
    (share,) = {builder.bubble_overhead(), simulated(builder).bubble_overhead}
    return share


def _slots(name: str) -> list[float]:
    builder = _of(name, 4, 4)
    return [simulated(builder, ONE).makespan_s / 2, simulated(builder, TWO).makespan_s]


def _peaks(name: str, p: int, m: int) -> list[int]:
    return list(check_schedule(_of(name, p, m).schedule()).peak_in_flight_per_rank)


def _ratio(m: int) -> float:
    return max(_peaks("gpipe", 8, m)) / max(_peaks("1f1b", 8, m))


PIPELINES = (
    Fact(
        id="002-20",
        claim="the naive bubble of 4 stages",
        correct=0.75,
        ours=lambda: _fraction("naive", 4, 4),
    ),
    Fact(
        id="002-21",
        claim="GPipe's bubble at p = m = 4 in both definitions",
        correct=[0.75, 0.4286],
        ours=lambda: [_overhead("gpipe", 4, 4), _fraction("gpipe", 4, 4)],
    ),
    Fact(
        id="002-22",
        claim="1F1B has the bubble of GPipe",
        correct=[0.4286, 0.4286],
        ours=lambda: [_fraction(name, 4, 4) for name in ("gpipe", "1f1b")],
    ),
    Fact(
        id="002-23",
        claim="the efficiency at p = m = 4",
        correct=0.5714,
        ours=lambda: 1 - _fraction("gpipe", 4, 4),
    ),
    Fact(
        id="002-24",
        claim="14 slots where a backward pass takes 1, 21 where it takes 2",
        correct=[14, 21, 14, 21],
        ours=lambda: [*_slots("gpipe"), *_slots("1f1b")],
    ),
    Fact(
        id="002-25",
        claim="what 4 stages hold of 8 microbatches, 1F1B and GPipe",
        correct=[4, 3, 2, 1, 8, 8, 8, 8],
        ours=lambda: [*_peaks("1f1b", 4, 8), *_peaks("gpipe", 4, 8)],
    ),
    Fact(
        id="002-26",
        claim="the bubble of m = 4p, for p = 2, 4, 8, 16",
        correct=[0.1111, 0.1579, 0.1795, 0.1899],
        ours=lambda: [_fraction("1f1b", p, 4 * p) for p in (2, 4, 8, 16)],
    ),
    Fact(
        id="002-29",
        claim="1024 sequences in microbatches of 1 over 2 data ranks and 4 stages",
        correct=[512, 0.0058],
        ours=lambda: [1024 // 2, _of("1f1b", 4, 1024 // 2).bubble_fraction()],
    ),
    Fact(
        id="003-36",
        claim="the bubble at p = m = 8",
        correct=0.4667,
        ours=lambda: _fraction("gpipe", 8, 8),
    ),
    Fact(
        id="003-37",
        claim="GPipe with 32, 1F1B with 8 and 32 microbatches on 8 stages",
        correct=[0.1795, 0.4667, 0.1795],
        ours=lambda: [_fraction("gpipe", 8, 32), _fraction("1f1b", 8, 8), _fraction("1f1b", 8, 32)],
    ),
    Fact(
        id="003-38",
        claim="what 1F1B holds of what GPipe holds, 8 stages and 32 microbatches",
        correct=0.25,
        ours=lambda: 1 / _ratio(32),
    ),
    Fact(
        id="003-39",
        claim="GPipe over 1F1B at p = m = 8: the peak, the sum over stages, the peak at m = 64",
        correct=[1.0, 1.7778, 8.0],
        ours=lambda: [
            _ratio(8),
            sum(_peaks("gpipe", 8, 8)) / sum(_peaks("1f1b", 8, 8)),
            _ratio(64),
        ],
    ),
    Fact(
        id="003-40",
        claim="totals over 8 stages for 64 microbatches, and 1F1B's largest stage",
        correct=[512, 36, 8],
        ours=lambda: [
            sum(_peaks("gpipe", 8, 64)),
            sum(_peaks("1f1b", 8, 64)),
            max(_peaks("1f1b", 8, 64)),
        ],
    ),
    Fact(
        id="003-74",
        claim="stage 0 of 1F1B holds p microbatches of 1/p of the layers: one of full depth",
        correct=1.0,
        ours=lambda: max(_peaks("1f1b", 8, 32)) / 8,
    ),
    Fact(
        id="X-01",
        claim="both definitions at p = 8, m = 32, for GPipe and 1F1B",
        correct=[0.2188, 0.1795, 0.2188, 0.1795],
        ours=lambda: [
            share(name, 8, 32) for name in ("gpipe", "1f1b") for share in (_overhead, _fraction)
        ],
    ),
)
