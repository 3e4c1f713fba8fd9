"""What would change the answer: other clusters and batches, each searched for its best plan.

A small space is searched whole for each question. Of a large one what is near the plan is, with
every microbatch in between, and plans of every other kind that did well here (`pool.py`). How much
faster is by what the request wants, for each token: seconds, or seconds times devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.planner.choice import Choice
from echelon.planner.explain.again import NEAR, Again
from echelon.planner.explain.differences import Difference, differences
from echelon.planner.explain.pool import Pooled, elsewhere, pool_of
from echelon.planner.explain.what_if import WhatIf, what_ifs
from echelon.planner.pins import Pins
from echelon.planner.ranked import Ranked, worth
from echelon.planner.request import Request
from echelon.planner.search import Answer

TIE = 1e-3
"""A share of a step below which another plan is no better than the one of now."""
LOOKED_AT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Say what is otherwise, and the best plan then; None where nothing fits.

    `gain` is by which share it is faster than the best of now, `gain_same` the plan of now in the
    changed world (None where it does not fit or is not legal). `differences` are none where the
    plan of now is still the best, or within TIE of it. `near` says whether only plans near the best
    were searched.
    """

    name: str
    best: Ranked | None
    gain: float
    gain_same: float | None
    differences: tuple[Difference, ...]
    near: bool


def sensitivity(answer: Answer, asked: Iterable[WhatIf] | None = None) -> tuple[Change, ...]:
    """Return what becomes of the best plan under each question, by default all of `what_if.py`."""
    assert answer.best is not None
    choice = answer.best.choice
    now = Again(answer, answer.request)
    questions = what_ifs(answer.request, choice) if asked is None else asked
    pool = pool_of(answer, now) if now.near else ()
    return tuple(_change(answer, now, question, pool) for question in questions)


def _change(answer: Answer, now: Again, question: WhatIf, pool: Sequence[Pooled]) -> Change:
    assert answer.best is not None
    again = Again(answer, question.request)
    known = [one.choice for one in (*answer.ranked, *answer.rest)[:LOOKED_AT]]
    usable = question.same == answer.best.choice
    among = known if usable else [question.same] if _legal(again, question.same) else []
    found = again.search(_microbatches(again, question.same), among=among)
    plans = [found.best] if found.best is not None else []
    bound = min((worth(again.request, one.estimate) for one in plans), default=math.inf)
    plans += elsewhere(pool, answer, again, question, bound * (1.0 - TIE))
    best = min(plans, key=lambda one: _cost(again.request, one), default=None)
    if best is None:
        return Change(
            name=question.name, best=None, gain=0.0, gain_same=None, differences=(), near=found.near
        )
    gain = _gain(now, answer.best.choice, again, best)
    gain_same = None
    if among and again.fits(question.same):
        gain_same = _gain(now, answer.best.choice, again, again.timed(question.same))
    changed = differences(question.same, best.choice)
    if gain_same is not None and gain - gain_same < TIE:
        changed = ()
    return Change(
        name=question.name,
        best=best,
        gain=gain,
        gain_same=gain_same,
        differences=changed,
        near=found.near,
    )


def _microbatches(again: Again, choice: Choice) -> Pins:
    """Return the pins of a search near a plan: every microbatch of half to twice its sequences."""
    pins, now = again.request.pins, choice.microbatch
    if not again.near or pins.of("microbatch") is not None:
        return pins
    return pins.having("microbatch", *range(max(1, now // NEAR), NEAR * now + 1))


def _legal(again: Again, choice: Choice) -> bool:
    """Return whether a plan that is to run with another batch, or on more devices, can."""
    total = again.request.mathematics.global_sequences
    return total == choice.mesh.dp * choice.microbatch * choice.microbatches and not again.problems(
        choice
    )


def _gain(now: Again, choice: Choice, again: Again, other: Ranked) -> float:
    """Return by which share a plan is faster than the best of now, both timed in the same way."""
    events = other.simulated or other.choice.mesh.pp == 1
    one = now.timed(choice) if events else now.closed(choice)
    if events and not one.simulated and choice.mesh.pp > 1:
        other = again.closed(other.choice)
    return _cost(now.request, one) / _cost(again.request, other) - 1.0


def _cost(request: Request, one: Ranked) -> float:
    return worth(request, one.estimate) / one.estimate.tokens
