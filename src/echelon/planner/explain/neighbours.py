# SPDX-License-Identifier: Apache-2.0
"""Why not the neighbours of the best plan: the rule, the bytes or the seconds against each.

Each neighbour is looked at twice: with one change and nothing else, and as the best of all plans
that have the change. A plan with one change may lose for what a second change would mend; that the
best of all loses too is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from echelon.core.errors import Problem
from echelon.core.rulebook.planner import NO_PLAN_IS_LEGAL, PLAN_FITS_MEMORY
from echelon.planner.explain.bands import (
    BandedTerms,
    BandedValue,
    byte_term_differences,
    step_difference_band,
    step_term_differences,
)
from echelon.planner.explain.plan_changes import PlanChange, neighbouring_changes
from echelon.planner.explain.repeat_search import RepeatSearch
from echelon.planner.predict.peak_bytes import peak_bytes_by_place
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult

NeighbourVerdict = Literal["refused", "too large", "slower", "as fast", "faster"]
ALIKE = 1e-4
"""A share of a step that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourOutcome:
    """Say what speaks against a plan, or for it."""

    verdict: NeighbourVerdict
    """What becomes of it."""
    plan: RankedPlan | None = None
    """The plan; None where rules refuse all."""
    problems: tuple[Problem, ...] = ()
    """Those of the rules that refuse it."""
    over_bytes: float = 0.0
    """Where it is too large, bytes by which it is."""
    grown: tuple[tuple[str, float], ...] = ()
    """Where it is too large, the terms that hold more than in the best plan, and bytes."""
    rank: str = ""
    """Where it is too large, the ranks that hold most, in words."""
    slower_s: BandedValue | None = None
    """Where it fits, seconds that a step takes longer."""
    share: float = 0.0
    """The same over a step of the best plan."""
    terms: BandedTerms = field(default_factory=dict[str, BandedValue])
    """The terms that make it slower, the largest first."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the ids of the rules that refuse it."""
        return tuple(problem.rule for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Hold a change, what it is by itself (None: no plan has it alone), and at its best."""

    change: str
    pins: Mapping[str, int | str]
    by_itself: NeighbourOutcome | None
    at_best: NeighbourOutcome
    searched_nearby: bool
    obstacle: str = ""


def explain_neighbours(answer: SearchResult) -> tuple[Neighbour, ...]:
    """Return the neighbours of the best plan, those that come nearest to it first."""
    request = request_on_same_devices(answer)
    again = RepeatSearch(answer, request)
    found = [
        _neighbour(again, answer.first, move)
        for move in neighbouring_changes(request, answer.first.candidate)
    ]
    return tuple(sorted(found, key=_nearness))


def request_on_same_devices(answer: SearchResult) -> SearchRequest:
    """Return the request on as many devices as the best plan takes, which are asked to be fast."""
    pins = answer.request.pins.having("devices", answer.first.candidate.devices)
    return replace(answer.request, pins=pins, objective="time")


def _compare_with_best(
    again: RepeatSearch, best: RankedPlan, choice: CandidatePlan
) -> NeighbourOutcome:
    """Return what speaks against one plan beside the best."""
    if problems := again.problems(choice):
        return NeighbourOutcome(verdict="refused", problems=problems)
    near = again.fits(choice) and again.close(best, choice)
    timed = again.time_by_events(choice) if near else again.estimate_closed_form(choice)
    return _compare_legal_with_best(again, best, timed)


def _compare_legal_with_best(
    again: RepeatSearch, best: RankedPlan, other: RankedPlan
) -> NeighbourOutcome:
    """Return what the bytes, or else the seconds, of a legal plan say against it."""
    over = other.estimate.bytes_held - again.request.memory_bytes
    # Of both plans the bytes of closed forms: lists are there of plans of an answer only.
    closed = again.estimate_closed_form(best.candidate).estimate
    grown = byte_term_differences(closed, other.estimate)
    more = tuple((name, count) for name, count in grown if count > 0)
    if over > 0:
        rank = fullest_rank(other)
        return NeighbourOutcome(
            verdict="too large", plan=other, over_bytes=over, grown=more, rank=rank
        )
    first, second = again.timed_the_same_way(best, other)
    slower = step_difference_band(first.estimate, second.estimate)
    share = slower.value / first.estimate.step_s
    verdict: NeighbourVerdict = "slower" if share > 0 else "faster"
    return NeighbourOutcome(
        verdict="as fast" if abs(share) < ALIKE else verdict,
        plan=second,
        grown=more,
        slower_s=slower,
        share=share,
        terms=step_term_differences(first.estimate, second.estimate),
    )


def fullest_rank(one: RankedPlan) -> str:
    """Return which ranks hold most: those of the first stage, or of the last, with the logits."""
    mesh = one.candidate.mesh
    if mesh.pp == 1:
        return "every rank" if mesh.world_size > 1 else "the rank"
    each = mesh.world_size // mesh.pp
    # Bytes of lists have no term for the logits: of these it is the place that holds most.
    if one.plan is not None:
        places = [sum(terms.values()) for terms in peak_bytes_by_place(one.plan)]
        place = places.index(max(places))
    else:
        place = mesh.pp - 1 if one.estimate.bytes["logits"] > 0 else 0
    return f"pp rank {place} (ranks {place * each} to {(place + 1) * each - 1})"


def _neighbour(again: RepeatSearch, best: RankedPlan, move: PlanChange) -> Neighbour:
    request = again.request
    exact, among = None, ()
    if move.candidate is not None:
        exact = _compare_with_best(again, best, move.candidate)
        among = (move.candidate,) if exact.slower_s is not None else ()
    pins = request.pins
    for name, value in move.pins.items():
        pins = pins.having(name, value)
    found = again.search(pins, among=among)
    if found.best is not None:
        free = _compare_legal_with_best(again, best, found.best)
    elif found.seen:
        free = _leanest(request, exact, found.least_bytes)
    else:
        problems = tuple(_refusals(request, move, exact, found.refused))
        free = NeighbourOutcome(verdict="refused", problems=problems)
    return Neighbour(
        change=move.name,
        pins=move.pins,
        by_itself=exact,
        at_best=free,
        searched_nearby=found.near,
        obstacle=move.obstacle,
    )


def _leanest(
    request: SearchRequest, exact: NeighbourOutcome | None, least_bytes: float
) -> NeighbourOutcome:
    """Return by how much everything with a change is too large; or the change by itself is."""
    over = least_bytes - request.memory_bytes
    if over > 0 or exact is None or exact.verdict != "too large":
        return NeighbourOutcome(verdict="too large", over_bytes=max(0.0, over))
    return exact


def _refusals(
    request: SearchRequest,
    move: PlanChange,
    exact: NeighbourOutcome | None,
    refused: Mapping[str, int],
) -> Iterator[Problem]:
    """Yield why no plan has a change: what is wrong with it alone, or the rules that were met."""
    if exact is not None and exact.problems:
        yield from exact.problems
        return
    said = ", ".join(f"{k}={v}" for k, v in move.pins.items())
    others = ((rule, count) for rule, count in refused.items() if rule != PLAN_FITS_MEMORY.id)
    because = (
        ", ".join(f"{rule} ({count})" for rule, count in others)
        or move.obstacle
        or "the mesh has no such place"
    )
    yield NO_PLAN_IS_LEGAL.problem(
        f"no plan over {request.pins.values['devices'][0]} devices has {said}: {because}"
    )


def _nearness(one: Neighbour) -> tuple[int, float]:
    places: Mapping[NeighbourVerdict, int] = {"too large": 1, "refused": 2}
    value = one.at_best.share if one.at_best.slower_s is not None else one.at_best.over_bytes
    return places.get(one.at_best.verdict, 0), value
