# SPDX-License-Identifier: Apache-2.0
"""What would change the answer: other clusters and batches, each searched for its best plan.

A small space is searched whole for each question. Of a large one what is near the plan is, with
every microbatch in between, and plans of every other kind that did well here (`distant_plans.py`).
How much faster is by what the request wants, for each token: seconds, or seconds times devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.planner.explain.distant_plans import DistantPlan, best_distant_plans, distant_plans
from echelon.planner.explain.plan_changes import CandidateDifference, candidate_differences
from echelon.planner.explain.repeat_search import NEAR, RepeatSearch
from echelon.planner.explain.what_if import WhatIf, what_if_requests
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.pins import Pins
from echelon.planner.search.ranked import RankedPlan, objective_value
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult

_TIE_SHARE = 1e-3
"""A share of a step below which another plan is no better than the one of now."""
_LOOKED_AT = 6  # candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityResult:
    """Say what is otherwise, and the best plan then; None where nothing fits.

    `gain` is by which share it is faster than the best of now, `gain_same` the plan of now in the
    changed world (None where it does not fit or is not legal). `candidate_differences` are none
    where the plan of now is still the best, or within TIE of it. `near` says whether only plans
    near the best were searched.
    """

    name: str
    best: RankedPlan | None
    near: bool
    gain: float = 0.0
    gain_same: float | None = None
    differences: tuple[CandidateDifference, ...] = ()


def sensitivity(
    answer: SearchResult, asked: Iterable[WhatIf] | None = None
) -> tuple[SensitivityResult, ...]:
    """Return what becomes of the best plan under each question, by default all of `what_if.py`."""
    choice = answer.first.candidate
    now = RepeatSearch(answer, answer.request)
    questions = what_if_requests(answer.request, choice) if asked is None else asked
    pool = distant_plans(answer, now) if now.near else ()
    return tuple(_change(answer, now, question, pool) for question in questions)


def _change(
    answer: SearchResult, now: RepeatSearch, question: WhatIf, pool: Sequence[DistantPlan]
) -> SensitivityResult:
    again = RepeatSearch(answer, question.request)
    current = question.current_plan
    if current == answer.first.candidate:
        known = (*answer.ranked, *answer.other_finalists)[:_LOOKED_AT]
        among = [one.candidate for one in known]
    else:
        among = [current] if _legal(again, current) else []
    found = again.search(_microbatches(again, current), among=among)
    plans = [found.best] if found.best is not None else []
    bound = min((objective_value(again.request, one.estimate) for one in plans), default=math.inf)
    plans += best_distant_plans(pool, answer, again, question, bound * (1.0 - _TIE_SHARE))
    best = min(plans, key=lambda one: _cost(again.request, one), default=None)
    if best is None:
        return SensitivityResult(name=question.name, best=None, near=found.near)
    gain = _gain(now, answer.first.candidate, again, best)
    changed, gain_same = candidate_differences(current, best.candidate), None
    if among and again.fits_by_lists(current):
        gain_same = _gain(now, answer.first.candidate, again, again.time_by_events(current))
        changed = () if gain - gain_same < _TIE_SHARE else changed
    return SensitivityResult(
        name=question.name,
        best=best,
        gain=gain,
        gain_same=gain_same,
        differences=changed,
        near=found.near,
    )


def _microbatches(again: RepeatSearch, choice: CandidatePlan) -> Pins:
    """Return the pins of a search near a plan: every microbatch of half to twice its sequences."""
    pins, now = again.request.pins, choice.microbatch
    if not again.near or pins.values_of("microbatch") is not None:
        return pins
    return pins.having("microbatch", *range(max(1, now // NEAR), NEAR * now + 1))


def _legal(again: RepeatSearch, choice: CandidatePlan) -> bool:
    """Return whether a plan that is to run with another batch, or on more devices, can."""
    total = again.request.mathematics.global_sequences
    even = total == choice.mesh.dp * choice.microbatch * choice.microbatches
    return even and not again.problems(choice)


def _gain(
    now: RepeatSearch, choice: CandidatePlan, again: RepeatSearch, other: RankedPlan
) -> float:
    """Return by which share a plan is faster than the best of now, both timed in the same way."""
    events = other.simulated or other.candidate.mesh.pp == 1
    one = now.time_by_events(choice) if events else now.estimate_closed_form(choice)
    if events and not one.simulated and choice.mesh.pp > 1:
        other = again.estimate_closed_form(other.candidate)
    return _cost(now.request, one) / _cost(again.request, other) - 1.0


def _cost(request: SearchRequest, one: RankedPlan) -> float:
    return objective_value(request, one.estimate) / one.estimate.tokens
