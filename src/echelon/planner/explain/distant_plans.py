# SPDX-License-Identifier: Apache-2.0
"""Plans that may be the best elsewhere: of each pipeline and tensor degree the best few of now.

A question about a large space is searched near the plan only. What is far from it, such as no
pipeline at all, is looked for once, in the world of the answer, and timed there event by event.
In another world their closed forms, times what events made of them here, say which few pipeline
degrees promise most; these are searched there with all else free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from echelon.planner.explain.plan_changes import with_recounted_microbatches
from echelon.planner.explain.repeat_search import RepeatSearch
from echelon.planner.explain.what_if import WhatIf
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.legal_meshes import divisors
from echelon.planner.search.ranked import RankedPlan, objective_value, pipeline_order
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult, world_sizes
from echelon.planner.search.sweep import SearchSweep

KEPT = 12
"""Plans of each degree."""
_LONGEST = 64
"""Pipeline ranks up to which plans are looked for; more are near the plan, or no good."""
ACTIONS = 150_000
"""Actions that are timed in the world of the answer."""
FAR = 0.3
"""By how much slower a plan is here, by closed forms, that is not looked at elsewhere."""
DEGREES_SEARCHED = 3  # degrees
CLOSE = 0.04  # of the least seconds, relative
"""Pipeline degrees that are searched for one question, and how close to the first they promise."""


DistantPlan: TypeAlias = tuple[CandidatePlan, float]
"""A plan, and its seconds by events over those by closed forms in the answer's world."""


def distant_plans(answer: SearchResult, now: RepeatSearch) -> tuple[DistantPlan, ...]:
    """Return plans of every kind; what no event timed is like what was timed of its degree."""
    found = {choice: None for degree in _degrees(answer) for choice in _best_of(answer, *degree)}
    finalists = [one.candidate for one in (*answer.ranked, *answer.other_finalists)]
    every = {choice: now.estimate_closed_form(choice) for choice in (*found, *finalists)}
    values = {c: objective_value(now.request, one.estimate) for c, one in every.items()}
    least = min(values.values())
    near = {choice: value for choice, value in values.items() if value < least * (1 + FAR)}
    return tuple(_distant_plan(now, _in_turn(near)))


def best_distant_plans(
    pool: Sequence[DistantPlan],
    answer: SearchResult,
    again: RepeatSearch,
    question: WhatIf,
    bound: float,
) -> Iterator[RankedPlan]:
    """Yield the best plans under a question of the few pipeline degrees that promise most.

    Those that promise no less than `bound`, what the best plan near the old one is worth, are not
    looked at.
    """
    whole = RepeatSearch(answer, question.request)
    whole.near = False
    promised: dict[int, tuple[float, CandidatePlan]] = {}
    for here, ratio in pool:
        choice = _moved(answer.request, question.request, here)
        if choice is not None and again.fits(choice):
            closed = again.estimate_closed_form(choice).estimate
            cost = ratio * objective_value(again.request, closed)
            if choice.mesh.pp not in promised or cost < promised[choice.mesh.pp][0]:
                promised[choice.mesh.pp] = cost, choice
    order = sorted(promised, key=lambda degree: promised[degree][0])
    for degree in order[:DEGREES_SEARCHED]:
        cost, choice = promised[degree]
        if cost > (1 + CLOSE) * promised[order[0]][0] or cost >= bound:
            return
        among = () if whole.problems(choice) else (choice,)
        found = whole.search(question.request.pins.having("pp", degree), among=among)
        if found.best is not None:
            yield found.best


def _degrees(answer: SearchResult) -> Iterator[tuple[str, int]]:
    """Yield the degrees of which each has its best plans."""
    request = answer.request
    longest = min(_LONGEST, request.model.layers)
    for name, most in (("pp", longest), ("tp", request.cluster.devices_per_node)):
        for degree in divisors(request.cluster.num_devices):
            if degree <= most and request.pins.allows(name, degree):
                yield name, degree


def _best_of(answer: SearchResult, name: str, degree: int) -> list[CandidatePlan]:
    pins = answer.request.pins.having(name, degree)
    request = replace(answer.request, pins=pins)
    sweep = SearchSweep(request, offload=answer.offload, keep=KEPT)
    for world in world_sizes(request):
        sweep.walk(world)
    return [one.candidate() for one in sweep.best.ranked()]


def _in_turn(values: Mapping[CandidatePlan, float]) -> list[CandidatePlan]:
    """Return plans by their values, but the best of each pipeline degree before any second one."""
    order = sorted(values, key=values.__getitem__)
    before: Counter[int] = Counter()
    places: dict[CandidatePlan, int] = {}
    for choice in order:
        places[choice] = before[choice.mesh.pp]
        before[choice.mesh.pp] += 1
    return sorted(order, key=places.__getitem__)


def _distant_plan(now: RepeatSearch, choices: Sequence[CandidatePlan]) -> Iterator[DistantPlan]:
    left = ACTIONS
    alike: dict[int, float] = {1: 1.0}
    for choice in choices:
        degree = choice.mesh.pp
        actions = 0 if degree == 1 else pipeline_order(choice).num_actions
        ratio = alike.get(degree)
        if actions and actions <= left:
            left -= actions
            one = now.time_by_events(choice)
            if one.simulated:
                ratio = one.estimate.step_s / now.estimate_closed_form(choice).estimate.step_s
                alike.setdefault(degree, ratio)
        if ratio is not None:
            yield choice, ratio


def _moved(
    here: SearchRequest, there: SearchRequest, choice: CandidatePlan
) -> CandidatePlan | None:
    """Return a plan with the batch and the devices of another world, None where it is uneven."""
    times = there.cluster.num_devices // here.cluster.num_devices
    total = there.mathematics.global_sequences
    if times == 1 and total == here.mathematics.global_sequences:
        return choice
    mesh = replace(choice.mesh, dp_shard=times * choice.mesh.dp_shard)
    moved = with_recounted_microbatches(there, replace(choice, mesh=mesh))
    even = total == moved.mesh.dp * moved.microbatch * moved.microbatches
    return moved if even else None
