# SPDX-License-Identifier: Apache-2.0
"""Search again, for a question about an answer: quickly, and timed as the answer's plans were.

Where the space of the answer is large, only what is near its best plan is walked: degrees and
microbatches of at most NEAR times as many or as few, every schedule, every way to share out, every
recompute. `RepeatSearchResult.near` says which of the two it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.core.choices.context_kinds import PLAIN_CONTEXT_KIND
from echelon.core.errors import ConfigError, Problem
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.pins import Pins
from echelon.planner.search.ranked import (
    RankedPlan,
    closed_form_plan,
    objective_value,
    pipeline_order,
    time_by_events,
    with_checked_plan,
)
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult, walk_worlds
from echelon.planner.search.sweep import SearchSweep

_LARGE_SPACE = 500_000
"""Legal plans from which on only the neighbourhood of the best is walked again."""
NEAR = 2  # a factor
_MOST_ACTIONS = 25_000
"""Actions that are timed for one plan; with more it keeps its closed form."""
KEPT = 6  # candidates
_ACTIONS_TOGETHER = 25_000
"""Actions that are timed in one search, beside those of plans that were timed before."""
CLOSE = 0.1
"""By how much slower a plan is, by closed forms, whose events nobody needs to time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatSearchResult:
    """Hold the best plan of another search; none where nothing is legal, or nothing fits."""

    best: RankedPlan | None
    near: bool
    seen: int
    refused: Mapping[str, int]
    least_bytes: float


class RepeatSearch:
    """Search and time plans of one model and batch on one cluster; each plan is timed once."""

    def __init__(self, answer: SearchResult, request: SearchRequest) -> None:
        """Keep the answer in question, and a request that differs from it in something."""
        self.request = request
        self.near = answer.num_legal > _LARGE_SPACE
        self._best = answer.first.candidate
        self._offload = answer.offload
        self._closed: dict[CandidatePlan, RankedPlan] = {}
        self._timed: dict[CandidatePlan, RankedPlan] = {}

    def search(
        self, pins: Pins | None = None, *, among: Sequence[CandidatePlan] = ()
    ) -> RepeatSearchResult:
        """Return the best plan under `pins`; plans of `among` that fit are looked at too."""
        request = replace(self.request, pins=pins or self.request.pins)
        if self.near:
            request = replace(request, pins=pins_near_candidate(request.pins, self._best))
        sweep = SearchSweep(request, offload=self._offload, keep=KEPT)
        walk_worlds(sweep)
        return RepeatSearchResult(
            best=self._first(among, (one.candidate() for one in sweep.best.ranked())),
            near=self.near,
            seen=sweep.counts.seen,
            refused=dict(sweep.counts.refused),
            least_bytes=sweep.least_bytes,
        )

    def estimate_closed_form(self, choice: CandidatePlan) -> RankedPlan:
        """Return what a plan takes by closed forms."""
        if choice not in self._closed:
            self._closed[choice] = closed_form_plan(self.request, choice)
        return self._closed[choice]

    def time_by_events(self, choice: CandidatePlan) -> RankedPlan:
        """Return what a plan takes, event by event where that is short."""
        if choice.mesh.pp == 1 or pipeline_order(choice).num_actions > _MOST_ACTIONS:
            return self.estimate_closed_form(choice)
        if choice not in self._timed:
            self._timed[choice] = time_by_events(self.request, self.estimate_closed_form(choice))
        return self._timed[choice]

    def timed_the_same_way(
        self, best: RankedPlan, other: RankedPlan
    ) -> tuple[RankedPlan, RankedPlan]:
        """Return two plans timed in the same way: by closed forms where one has no events."""
        alone = best.candidate.mesh.pp == 1 or other.candidate.mesh.pp == 1
        if alone or best.simulated == other.simulated:
            return best, other
        return self.estimate_closed_form(best.candidate), self.estimate_closed_form(other.candidate)

    def close(self, best: RankedPlan, other: CandidatePlan) -> bool:
        """Return whether closed forms leave open which of two plans is faster."""
        least = (1.0 + CLOSE) * self.estimate_closed_form(best.candidate).estimate.step_s
        return self.estimate_closed_form(other).estimate.step_s < least

    def fits(self, choice: CandidatePlan) -> bool:
        """Return whether the fullest rank of a plan has enough memory."""
        return self.estimate_closed_form(choice).estimate.bytes_held <= self.request.memory_bytes

    def by_lists(self, one: RankedPlan) -> RankedPlan | None:
        """Return a plan with the bytes of its lists; None where a rule refuses it.

        Closed forms may say a little more than a plan holds.
        """
        try:
            return with_checked_plan(self.request, one)
        except ConfigError:
            return None

    def fits_by_lists(self, choice: CandidatePlan) -> bool:
        """Return whether a plan fits, by its lists where closed forms say that it does not."""
        if self.fits(choice):
            return True
        found = self.by_lists(self.estimate_closed_form(choice))
        return found is not None and found.estimate.bytes_held <= self.request.memory_bytes

    def problems(self, choice: CandidatePlan) -> tuple[Problem, ...]:
        """Return what the rules of a run say against a plan; nothing where it is legal."""
        return candidate_problems(self.request, choice)

    def _first(
        self, among: Sequence[CandidatePlan], others: Iterable[CandidatePlan]
    ) -> RankedPlan | None:
        """Return the best of the plans that fit: `among`, then the others by closed forms.

        Only plans that were timed in the same way are compared, so what is left untimed drops out.
        """
        closed = sorted(
            (self.estimate_closed_form(one) for one in others if self.fits(one)), key=self._worth
        )
        order = dict.fromkeys((*filter(self.fits, among), *(one.candidate for one in closed)))
        left, found = _ACTIONS_TOGETHER, list[RankedPlan]()
        for choice in order:
            known = choice in self._timed or choice.mesh.pp == 1
            count = 0 if known else pipeline_order(choice).num_actions
            if count <= left or not found:
                left -= count
                found.append(self.time_by_events(choice))
        return min(found, key=self._worth, default=None)

    def _worth(self, one: RankedPlan) -> float:
        return objective_value(self.request, one.estimate)


def candidate_problems(request: SearchRequest, choice: CandidatePlan) -> tuple[Problem, ...]:
    """Return what the rules of a run say against a plan; nothing where it is legal.

    Blocks are cut evenly: no rule asks for how well they balance, and that takes long.
    """
    settings = choice.settings(has_experts=request.model.experts is not None)
    if choice.mesh.pp > 1:
        settings["pipeline.stages"] = "even"
    try:
        request.job(settings)
    except ConfigError as error:
        return tuple(error.problems)
    return ()


def pins_near_candidate(pins: Pins, choice: CandidatePlan) -> Pins:
    """Return pins to what is near a plan, beside those that there are."""
    mesh = choice.mesh
    degrees = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "ep": mesh.ep}
    for name, value in {**degrees, "microbatch": choice.microbatch}.items():
        if pins.values_of(name) is None:
            close = {value, value * NEAR, value // NEAR if value % NEAR == 0 else value}
            pins = pins.having(name, *sorted(close))
    if pins.values_of("context") is None:
        pins = pins.having("context", *sorted({choice.context, PLAIN_CONTEXT_KIND}))
    if pins.values_of("expert_tp") is None:
        pins = pins.having("expert_tp", *sorted({1, choice.expert_tp}))
    return pins
