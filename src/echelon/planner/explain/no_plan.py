# SPDX-License-Identifier: Apache-2.0
"""Why a search found nothing: the leanest plan in numbers, and the cheapest changes that fit.

If no plan is legal, the error names a pin without which one is. If plans are legal and none fits,
the leanest plan has the missing bytes and its largest terms, and `what_fits.py` has the changes
with which a plan fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isinf
from typing import Self

from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.rulebook.planner import (
    NO_PLAN_IS_LEGAL,
    PIN_EXCLUDES_EVERYTHING,
    PLAN_FITS_MEMORY,
)
from echelon.core.rules import nearest_divisors
from echelon.core.units import binary_bytes
from echelon.planner.explain.fixes import PlanFix
from echelon.planner.explain.what_fits import changes_that_fit
from echelon.planner.predict.estimate import Estimate
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.ranked import (
    RankedPlan,
    closed_form_plan,
    estimate_candidate,
    with_checked_plan,
)
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import (
    SearchResult,
    best_fitting_anywhere,
    best_fitting_plan,
    walk_worlds,
    world_sizes,
)
from echelon.planner.search.sweep import SearchSweep

DEGREES = ("tp", "pp", "cp", "dp", "ep")
MOST_TRIED = 4
"""Degrees near a pinned one that are tried."""
LARGEST_TERMS = 3
"""Terms of the leanest plan that an error names."""
_NEARLY = 1.01
"""Times the least memory in which the fastest plan counts as the leanest."""
_HALVINGS = 8  # times
_ENDLESS = 1e18  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanestPlan:
    """Hold the plan that holds least where none fits, and the changes with which one does."""

    request: SearchRequest
    """The search in which nothing fits."""
    ranked: RankedPlan
    """The fastest of the plans that hold about the least."""
    num_legal: int
    """Plans that rules allow; none of them fits."""
    fixes: tuple[PlanFix, ...]
    """Changes with which a plan fits, the cheapest first of each kind."""

    @property
    def estimate(self) -> Estimate:
        """Return the seconds and bytes of the plan."""
        return self.ranked.estimate

    @property
    def over_bytes(self) -> float:
        """Return the bytes that a device lacks for it."""
        return self.estimate.bytes_held - self.request.memory_bytes

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """Return the bytes of its terms, the largest first."""
        return tuple(sorted(self.estimate.bytes.items(), key=lambda term: -term[1]))


class NothingFits(InfeasiblePlan):
    """Plans are legal, and none of them fits: the search ran, and its answer is no.

    `leanest` is the plan that holds least, with what would fit; None where no model was searched.
    """

    exit_code = 1

    def __init__(self, problems: Problem | Iterable[Problem], leanest: LeanestPlan | None = None):
        """Keep problems, and the plan that they are about."""
        super().__init__(problems)
        self.leanest = leanest

    def with_problems(self, problems: Iterable[Problem]) -> Self:
        """Return the error with other words for its problems."""
        return type(self)(problems, self.leanest)


def explain_no_plan(answer: SearchResult) -> InfeasiblePlan:
    """Return the error that says why an answer has no plan, and what would help."""
    request = answer.request
    if answer.num_legal and (leanest := leanest_plan(answer)) is not None:
        return NothingFits(_problem_of_memory(leanest), leanest)
    blamed = [
        name for name in request.pins.values if best_fitting_anywhere(request.without_pins(name))
    ]
    if blamed:
        return InfeasiblePlan([_problem_of_pins(answer, (name,)) for name in blamed])
    if together := _blamed_together(request):
        return InfeasiblePlan(_problem_of_pins(answer, together))
    return InfeasiblePlan(_not_legal(answer))


def leanest_plan(answer: SearchResult) -> LeanestPlan | None:
    """Return the leanest plan of an answer in which nothing fits, and what makes one fit.

    None where it fits, and another rule refused what closed forms let through.
    """
    request = answer.request
    ranked = leanest_ranked(request)
    if ranked is None or ranked.estimate.bytes_held <= request.memory_bytes:
        return None
    return LeanestPlan(
        request=request,
        ranked=ranked,
        num_legal=answer.num_legal,
        fixes=tuple(changes_that_fit(request, ranked)),
    )


def leanest_ranked(request: SearchRequest) -> RankedPlan | None:
    """Return the fastest of the plans that hold about the least, None where none is legal.

    Its bytes are of lists, not of closed forms.
    """
    pinned = request.pins.values_of("offload") is not None
    least = {offload: _least_bytes(request, offload=offload) for offload in {False, not pinned}}
    offload = min(least, key=lambda one: least[one])
    if isinf(least[offload]):
        return None
    choice = _leanest_choice(request, least[offload], offload=offload)
    closed = closed_form_plan(request, choice)
    try:
        exact = with_checked_plan(request, closed)
    except ConfigError:
        return closed
    # Closed forms may say a little more than lists: a search goes by both.
    return exact if exact.estimate.bytes_held > request.memory_bytes else closed


def _leanest_choice(request: SearchRequest, least: float, *, offload: bool) -> CandidatePlan:
    """Return the best of the plans within the least memory in which one is found.

    `least` is a bound; memory doubles from there until there is a plan, then its bytes and what was
    too little are halved between.
    """
    too_little, room = least, _NEARLY * least + 1.0
    while (scored := best_fitting_plan(request.with_memory(room), offload=offload)) is None:
        too_little, room = room, 2.0 * room
        assert room < _ENDLESS, "an answer with legal plans has a leanest one"
    choice = scored.candidate()
    for _ in range(_HALVINGS):
        enough = estimate_candidate(request, choice).bytes_held
        if enough <= _NEARLY * too_little:
            break
        room = (too_little + enough) / 2.0
        leaner = best_fitting_plan(request.with_memory(room), offload=offload)
        if leaner is None:
            too_little = room
        else:
            choice = leaner.candidate()
    return choice


def _least_bytes(request: SearchRequest, *, offload: bool) -> float:
    """Return a lower bound of the bytes of any plan; infinite without a plan."""
    sweep = SearchSweep(request.with_memory(1.0), offload=offload, keep=1)
    walk_worlds(sweep)
    return sweep.least_bytes


def _problem_of_memory(leanest: LeanestPlan) -> Problem:
    """Return the problem of plans that are legal and too large, with the numbers of the leanest."""
    request, fixes = leanest.request, leanest.fixes
    freed = [fix for fix in fixes if fix.flags.startswith("--pin ")]
    texts = request.pins.texts.values()
    pins = f" with {', '.join(texts)}" if texts else ""
    largest = ", ".join(
        f"{name} {binary_bytes(count)}" for name, count in leanest.terms[:LARGEST_TERMS]
    )
    hosts = [fix for fix in fixes if fix.choice.offload]
    clusters = [fix.flags.split()[1] for fix in hosts if fix.flags.startswith("--cluster ")]
    note = f"; with optimizer state on the host: {', '.join(clusters)}" if clusters else ""
    rule = PIN_EXCLUDES_EVERYTHING if freed else PLAN_FITS_MEMORY
    return rule.problem(
        f"none of {leanest.num_legal:,} plans of {request.model.name} on {request.cluster.name}"
        f"{pins} fits: the leanest holds {binary_bytes(leanest.estimate.bytes_held)}, a device has "
        f"{binary_bytes(request.memory_bytes)}, {binary_bytes(leanest.over_bytes)} too little; "
        f"most of it is {largest}{note}",
        key="" if freed else "cluster",
        set_by=" ".join(dict.fromkeys(request.pins.typed.values())) if freed else "",
        suggestions=dict.fromkeys(fix.flags for fix in fixes),
    )


def _blamed_together(request: SearchRequest) -> tuple[str, ...]:
    """Return the fewest pins without which there is a plan, if that takes more than one."""
    names, every = tuple(request.pins.texts), tuple(request.pins.values)
    if len(every) < 2 or not best_fitting_anywhere(request.without_pins(*every)):
        return ()
    for count in range(2, len(names)):
        for some in combinations(names, count):
            if best_fitting_anywhere(request.without_pins(*some)):
                return some
    return every


def _problem_of_pins(answer: SearchResult, names: Sequence[str]) -> Problem:
    """Return the problem of pins with which no plan is legal, though one is without them."""
    request = answer.request
    scored = best_fitting_anywhere(request.without_pins(*names))
    assert scored is not None
    choice = scored.candidate()
    texts = [request.pins.text(name) for name in names]
    without = "it" if len(names) == 1 else "them"
    because = _rules_met(answer) or ", ".join(_rests(request))
    refused = f" ({because})" if because else ""
    return PIN_EXCLUDES_EVERYTHING.problem(
        f"with {' and '.join(texts)} no plan of {request.model.name} on {request.cluster.name} is "
        f"legal{refused}; without {without} there is one",
        set_by=" ".join(dict.fromkeys(request.pins.typed[name] for name in names)),
        suggestions=(
            " ".join(f"--pin {name}={choice.pin_value(name)}" for name in names),
            *(_others(request, names[0], choice) if len(names) == 1 else ()),
        ),
    )


def _rules_met(answer: SearchResult) -> str:
    """Return the rules that refused meshes, each with how many."""
    return ", ".join(f"{rule} ({count:,})" for rule, count in answer.refused.items())


def _rests(request: SearchRequest) -> Iterator[str]:
    """Yield pinned degrees that do not divide the devices, and experts that a model lacks."""
    if not (counts := world_sizes(request)):
        yield f"{request.cluster.name} has {request.cluster.num_devices:,} devices"
        return
    pinned_experts = {"ep", "expert_tp"} & {*request.pins.values}
    if request.model.experts is None and pinned_experts:
        yield f"{request.model.name} has no experts"
    for name in DEGREES[:-1]:
        pinned = [int(value) for value in request.pins.values.get(name, ())]
        if pinned and all(count % value for count in counts for value in pinned):
            count, value = counts[0], pinned[0]
            yield f"{count:,} devices % {name} {value} = {count % value}"


def _others(request: SearchRequest, name: str, choice: CandidatePlan) -> Iterator[str]:
    """Yield other values of a degree that work, those near the pinned one first."""
    pinned = request.pins.values_of(name)
    if name not in DEGREES or not pinned:
        return
    best, wanted = choice.pin_value(name), int(pinned[0])
    near = nearest_divisors(request.cluster.num_devices, wanted, limit=MOST_TRIED)
    for value in sorted(near, key=lambda one: abs(one - wanted)):
        pins = request.pins.without(name).having(name, value)
        if str(value) != best and best_fitting_anywhere(replace(request, pins=pins)):
            yield f"--pin {name}={value}"


def _not_legal(answer: SearchResult) -> Problem:
    request = answer.request
    rules = _rules_met(answer) or "none left"
    total = request.mathematics.global_sequences
    world = request.cluster.num_devices
    near = sorted({max(1, total // world) * world, (total // world + 1) * world})
    works = [
        count
        for count in near
        if best_fitting_anywhere(_with_mathematics(request, global_sequences=count))
    ]
    return NO_PLAN_IS_LEGAL.problem(
        f"no mesh of {request.model.name} over {world:,} devices is legal: {rules}",
        key="mesh",
        suggestions=tuple(f"batch.global_sequences = {count}" for count in works),
    )


def _with_mathematics(request: SearchRequest, **changes: int) -> SearchRequest:
    mathematics = replace(request.mathematics, **changes)  # type: ignore[arg-type]
    return replace(request, one_rank_run=replace(request.one_rank_run, mathematics=mathematics))
