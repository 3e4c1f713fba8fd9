"""From the best plans by closed forms to Plans: timed by events, and held to the byte.

The first in line becomes a Plan with the bytes of its lists (`held.py`). Where those are more than
a device has, its next one in line is the same plan with more recompute, timed anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from echelon.core.errors import ConfigError
from echelon.core.rulebook.planner import PLAN_FITS_MEMORY
from echelon.planner.best import Entrant
from echelon.planner.choice import Choice
from echelon.planner.choices import recomputes_of
from echelon.planner.ranked import Ranked, as_plan, by_events, estimate_choice, place_of
from echelon.planner.request import Request

MOST_TOO_LARGE = 20
"""Plans in a row that may hold too much before others are looked for."""

Line = list[tuple[tuple[float, ...], int, Ranked]]


@dataclass(slots=True)
class Picked:
    """Hold the plans of an answer, best first, the finalists that are left, and what was refused.

    `too_large` is how many finalists held more than closed forms said, and than a device has.
    """

    ranked: list[Ranked] = field(default_factory=list[Ranked])
    rest: list[Ranked] = field(default_factory=list[Ranked])
    refused: Counter[str] = field(default_factory=Counter[str])

    @property
    def too_large(self) -> int:
        """Return how many finalists held too much."""
        return self.refused[PLAN_FITS_MEMORY.id]


def pick(request: Request, entrants: Sequence[Entrant], *, top: int, events: bool = True) -> Picked:
    """Return the best `top` of the plans that fit, as Plans."""
    picked, line = Picked(), _line(request, entrants, events=events)
    while line and len(picked.ranked) < top and picked.too_large < MOST_TOO_LARGE:
        _, number, one = heappop(line)
        try:
            found = as_plan(request, one)
        except ConfigError as error:
            picked.refused.update(error.rules)
            continue
        if found.estimate.bytes_held <= request.memory_bytes:
            picked.ranked.append(found)
            continue
        picked.refused[PLAN_FITS_MEMORY.id] += 1
        leaner = _with_more_recompute(request, one.choice)
        if leaner is not None:
            again = _timed(request, leaner, events=events)
            heappush(line, (place_of(request, again), number, again))
    picked.rest = [one for _, _, one in sorted(line, key=lambda item: item[:2])]
    return picked


def _line(request: Request, entrants: Sequence[Entrant], *, events: bool) -> Line:
    """Return plans with their places in line, the first first."""
    timed = [_timed(request, entrant.choice(), events=events) for entrant in entrants]
    line = [(place_of(request, one), number, one) for number, one in enumerate(timed)]
    heapify(line)
    return line


def _timed(request: Request, choice: Choice, *, events: bool) -> Ranked:
    one = Ranked(choice=choice, estimate=estimate_choice(request, choice), simulated=False)
    return by_events(request, one) if events and choice.mesh.pp > 1 else one


def _with_more_recompute(request: Request, choice: Choice) -> Choice | None:
    """Return the same plan with the next more of its blocks recomputed; None where all are."""
    levels = recomputes_of(request.pins, request.model.layers)
    more = [level for level in levels if level[1] > choice.recomputed_share]
    if not more:
        return None
    every, share = more[0]
    return replace(choice, recompute=every, recomputed_share=share)
