# SPDX-License-Identifier: Apache-2.0
"""The plan to run, and those that somebody may prefer, each with what that costs.

The fastest plan of a search is the first of hundreds that are within a percent, and the prediction
of a step is off by more: of two plans of one run that are predicted to be near each other, four in
five ratios of seconds lie within `PAIRS["near"]`. So a simpler plan is recommended where a faster
one is really faster with a probability below CONVINCED, and of equally simple ones a surer one. And
a plan is recommended only if it fits with a probability of SURE, by how far off predictions of what
is not counted in memory were.

Devices may stay idle: where fewer of them take a shorter step, that is the answer.

A model without a cluster (`four_sizes`) has four answers: on the first of the common devices
(`presets/common_devices.toml`), the smallest cluster that has a plan and three larger ones, each
the next power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, inf
from statistics import NormalDist
from typing import Literal

from echelon.config.cluster.devices import common_devices
from echelon.config.cluster.settings import smallest_cluster
from echelon.core.units import gib
from echelon.planner.explain.no_plan import leanest_ranked
from echelon.planner.predict.bands import fit_probability, held_factor
from echelon.planner.predict.residuals import PAIRS
from echelon.planner.recommend.device_counts import (
    KEPT,
    PlansOnCount,
    best_count,
    may_idle,
    on_fewer_that_fit,
    picked,
)
from echelon.planner.recommend.longest_sequence import LongestSequence, longest_sequence
from echelon.planner.search.candidate import SPLITTING_AXES, Complexity, complexity, splitting_axes
from echelon.planner.search.ranked import (
    RankedPlan,
    closed_form_plan,
    objective_value,
    timed_plan,
    with_checked_plan,
)
from echelon.planner.search.request import LONGEST_SEQUENCE, SearchRequest
from echelon.planner.search.search import (
    SearchResult,
    best_fitting_plan,
    search,
    smallest_that_fits,
    without_host,
    world_sizes,
)

SURE = 0.95
"""The probability with which a recommended plan fits."""
CONVINCED = 0.6
"""The probability of being faster from which on a plan is preferred though it is less simple."""
_SUREST = 0.995
"""The probability of fitting from which on a surer plan is worth nothing."""
_LEAN_SHARES = (0.25, 0.5, 0.75)
"""Shares of a device's memory within which leaner plans are looked for."""
_CHEAP_SHARE = 0.125
"""The least share of the devices on which a cheaper plan is looked for: others take too long."""
_MOST_SLOWER = 1.5
"""How many times the seconds of the recommended plan a leaner one may take."""

Preference = Literal["fastest", "safest", "leanest", "cheapest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferredPlan:
    """Hold a plan that somebody may prefer: for what, and with what probability it fits."""

    preferred_for: tuple[Preference, ...]
    ranked: RankedPlan
    fits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutHost:
    """The best or the leanest plan with all optimizer state on the devices."""

    time_ratio: float | None = None
    """Seconds of the best plan over seconds of the recommended plan; None if none fits surely."""
    leanest: RankedPlan | None = None
    """The plan that holds least where none fits surely; None where none is legal either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Hold the plan to run, others to prefer, and the answer of the search that it rests on."""

    first: PreferredPlan
    """The plan to run."""
    others: tuple[PreferredPlan, ...]
    """Plans that are better at something."""
    answer: SearchResult
    """The answer, with the recommended plan first."""
    faster_share: float
    """By what share of its seconds the fastest plan is faster; 0 where it is the first."""
    sure: bool
    """Whether the first fits with the probability that is wanted."""
    without_host: WithoutHost | None = None
    """Plans without optimizer state on hosts, if the first plan has it there without a pin."""
    longest: LongestSequence | None = None
    """The longest sequence of which a plan fits, where that was asked for."""


def noise() -> float:
    """Return the share of seconds below which a faster plan is not worth being less simple."""
    deviation = PAIRS["near"] / NormalDist().inv_cdf(0.9)
    return exp(NormalDist().inv_cdf(CONVINCED) * deviation) - 1.0


def recommend(request: SearchRequest, *, alone: bool = False) -> Recommendation | SearchResult:
    """Return what to run of all plans of a request; the answer alone where there is none.

    It was stopped then, or no plan fits. Who shows the plan to run and no other one asks for it
    `alone`: others are not looked for, nor how much faster the fastest one is.
    """
    if request.objective == LONGEST_SEQUENCE:
        return _at_longest_sequence(request, alone=alone)
    answer = best_on_devices(surely_fitting(request))
    if answer.interrupted:
        return answer
    sure = answer.best is not None
    if not sure:
        answer = best_on_devices(request)
        if answer.best is None or answer.interrupted:
            return answer
    try:
        return recommend_from(answer, request, sure=sure, alone=alone)
    except KeyboardInterrupt:
        return replace(answer, interrupted=True)


def _at_longest_sequence(request: SearchRequest, *, alone: bool) -> Recommendation | SearchResult:
    """Return the plan to run with the longest sequences, which fits as surely as it must."""
    longest = longest_sequence(surely_fitting(request)) or longest_sequence(request)
    there = replace(request, objective="time") if longest is None else longest.request
    found = recommend(replace(there, uncounted_factor=request.uncounted_factor), alone=alone)
    if not isinstance(found, Recommendation):
        return found
    asked = replace(found.answer.request, objective=LONGEST_SEQUENCE)
    return replace(found, answer=replace(found.answer, request=asked), longest=longest)


def surely_fitting(request: SearchRequest, probability: float = SURE) -> SearchRequest:
    """Return the request whose plans fit with the probability that is wanted."""
    return replace(request, uncounted_factor=max(1.0, held_factor(request.software, probability)))


def best_on_devices(request: SearchRequest) -> SearchResult:
    """Return the answer of a search on all devices, or on fewer where nothing fits on all.

    However few plans are asked for, enough are found to choose from.
    """
    answer = search(replace(request, top=max(KEPT, request.top)))
    if answer.best is not None or answer.interrupted:
        return answer
    return on_fewer_that_fit(answer) or answer


def recommend_from(
    answer: SearchResult, request: SearchRequest, *, sure: bool = True, alone: bool = False
) -> Recommendation:
    """Return what to run of an answer that has a plan; `request` takes plans that may not fit.

    What is simpler is no slower than what is recommended on fewer devices: so a cluster is never
    slower than a smaller one of the same devices.
    """
    best = best_count(answer, noise())
    answer, wanted, offload = best.answer, answer.request, best.answer.offload
    near = _near(request, wanted, answer.ranked, offload=offload)
    base = min(near, key=lambda one: objective_value(request, one.estimate))
    first = _simplest(request, wanted, near, best.fewer)
    fastest, others = first, ()
    if not alone:
        fastest = _fastest(request, base, offload=base.candidate.offload)
        others = _others(request, first, fastest, near, offload=first.candidate.offload)
    rest = [one for one in _merged(answer.ranked) if one.candidate != first.candidate]
    faster = first.estimate.step_s / fastest.estimate.step_s - 1.0
    return Recommendation(
        first=PreferredPlan(preferred_for=(), ranked=first, fits=_fits(request, first)),
        others=others,
        answer=replace(answer, ranked=(first, *rest)[: request.top]),
        faster_share=max(0.0, faster),
        sure=sure,
        without_host=_without_host(request, wanted, first),
    )


def _without_host(
    request: SearchRequest, wanted: SearchRequest, first: RankedPlan
) -> WithoutHost | None:
    """Return the plans without hosts, if `first` has its optimizer state there."""
    if not first.candidate.offload or request.pins.values_of("offload") is not None:
        return None
    best = best_fitting_plan(without_host(wanted))
    if best is None:
        return WithoutHost(leanest=leanest_ranked(without_host(request)))
    estimate = closed_form_plan(request, best.candidate()).estimate
    return WithoutHost(time_ratio=estimate.step_s / first.estimate.step_s)


def _near(
    request: SearchRequest, wanted: SearchRequest, plans: Sequence[RankedPlan], *, offload: bool
) -> list[RankedPlan]:
    """Return the best of `plans` on a count of devices, and all that is within the noise of it.

    `wanted` takes plans that fit as surely as they must, `request` others too.
    """
    surer = _surer(request, plans[0], offload=offload)
    base = min((plans[0], *surer), key=lambda one: objective_value(request, one.estimate))
    limit = (1.0 + noise()) * objective_value(request, base.estimate)
    simpler = _simpler(wanted, base, limit, offload=offload)
    known = (base, *plans, *surer, *simpler, *_without_slices(wanted, base))
    return [one for one in known if objective_value(request, one.estimate) <= limit]


def _simplest(
    request: SearchRequest,
    wanted: SearchRequest,
    near: Sequence[RankedPlan],
    fewer: Sequence[PlansOnCount],
) -> RankedPlan:
    """Return the simplest plan that is no slower than what is recommended on fewer devices.

    One that is as fast as the best there is no slower; of the others that is asked. What is
    recommended there may be it, with devices left idle.
    """
    least, limit = min((one.worth for one in fewer), default=inf), inf
    first = min(near, key=lambda one: _preferred(request, one))
    if objective_value(request, first.estimate) <= least:
        return first
    there: list[RankedPlan] = []
    for one in fewer:
        plans = _near(request, wanted, one.plans, offload=one.offload)
        there.append(_simplest_below(request, (*plans, *there), limit))
        limit = objective_value(request, there[-1].estimate)
    return _simplest_below(request, (*near, *there), limit)


def _simplest_below(request: SearchRequest, near: Sequence[RankedPlan], limit: float) -> RankedPlan:
    """Return the simplest plan that is worth no more than `limit`."""
    allowed = [one for one in near if objective_value(request, one.estimate) <= limit]
    return min(allowed, key=lambda one: _preferred(request, one))


def _surer(request: SearchRequest, best: RankedPlan, *, offload: bool) -> list[RankedPlan]:
    """Return plans that fit almost certainly, where the risk that one does not is counted."""
    if request.objective != "expected":
        return []
    below = objective_value(request, best.estimate) * (1.0 + noise())
    surest = surely_fitting(request, _SUREST)
    return picked(surest, offload=offload, below=below, worlds=[best.candidate.devices])


def _fastest(request: SearchRequest, base: RankedPlan, *, offload: bool) -> RankedPlan:
    """Return the fastest plan that fits by what is expected: `base`, or one that may not."""
    value, worlds = objective_value(request, base.estimate), [base.candidate.devices]
    # Events may say less than the closed form by which plans are walked.
    some = picked(request, offload=offload, below=value * (1.0 + noise()), worlds=worlds, top=1)
    return min((base, *some), key=lambda one: objective_value(request, one.estimate))


def _order(request: SearchRequest, one: RankedPlan) -> tuple[Complexity, float, float]:
    """Return where a plan stands: the simplest first, then the best, then the leanest."""
    value = objective_value(request, one.estimate)
    return complexity(one.candidate), value, one.estimate.bytes_held


def _preferred(request: SearchRequest, one: RankedPlan) -> tuple[Complexity, bool, float, float]:
    """Return where a plan stands whose seconds are as good as those of others.

    Of equally simple ones those that fit for sure come first: the last gigabytes of a device are
    not worth what nobody can measure.
    """
    kind, value, held = _order(request, one)
    return kind, _fits(request, one) < _SUREST, value, held


def _fits(request: SearchRequest, one: RankedPlan) -> float:
    return fit_probability(one.estimate, request.memory_bytes)


def _simpler(
    request: SearchRequest, base: RankedPlan, limit: float, *, offload: bool
) -> Iterator[RankedPlan]:
    """Yield plans with fewer axes than `base` that are worth no more than `limit`.

    The fewest axes for which there is one are enough.
    """
    used = splitting_axes(base.candidate)
    pinned = request.pins.values
    free = [axis for axis in used if axis not in pinned]

    def simplest(wanted: SearchRequest, one: RankedPlan) -> tuple[object, ...]:
        # By events a plan may take longer than by the closed form by which it was walked.
        return objective_value(wanted, one.estimate) > limit, *_order(wanted, one)

    for count in range(len(used) - len(free), len(used)):
        found: list[RankedPlan] = []
        for kept in combinations(SPLITTING_AXES, count):
            if not set(kept) >= set(used) - set(free):
                continue
            pins = request.pins
            for axis in SPLITTING_AXES:
                if axis not in kept and axis not in pinned:
                    pins = pins.having(axis, 1)
            some = replace(request, pins=pins)
            worlds = [base.candidate.devices]
            found += picked(some, offload=offload, below=limit, worlds=worlds, top=1, key=simplest)
        if found:
            yield from found
            return


def _without_slices(request: SearchRequest, base: RankedPlan) -> Iterator[RankedPlan]:
    """Yield the plan whose nodes keep nothing, where `base` is one whose nodes do."""
    choice = base.candidate
    if choice.keeps_slices and request.pins.allows("secondary", 0):
        plain = timed_plan(request, replace(choice, secondary=False))
        yield with_checked_plan(request, plain)


def _merged(plans: Sequence[RankedPlan]) -> Iterator[RankedPlan]:
    """Yield plans; of those with equal seconds and bytes the simplest alone."""
    found: dict[tuple[str, str], RankedPlan] = {}
    for one in plans:
        key = (f"{one.estimate.step_s:.4g}", gib(one.estimate.bytes_held))
        known = found.get(key)
        if known is None or complexity(one.candidate) < complexity(known.candidate):
            found[key] = one
    yield from found.values()


def _others(
    request: SearchRequest,
    first: RankedPlan,
    fastest: RankedPlan,
    near: Sequence[RankedPlan],
    *,
    offload: bool,
) -> tuple[PreferredPlan, ...]:
    """Return the plans that are better than `first` at something, each once."""
    lean = _leaner(request, first, offload=offload)
    safest = max((*near, *lean), key=lambda one: (_fits(request, one), -one.estimate.step_s))
    leanest = min((*near, *lean), key=lambda one: one.estimate.bytes_held)
    named: list[tuple[Preference, RankedPlan]] = []
    if fastest.estimate.step_s < first.estimate.step_s:
        named.append(("fastest", fastest))
    if _fits(request, safest) > _fits(request, first) + 0.005:
        named.append(("safest", safest))
    if leanest.estimate.bytes_held < first.estimate.bytes_held:
        named.append(("leanest", leanest))
    cheaper = _cheaper(request, first, offload=offload)
    if cheaper is not None:
        named.append(("cheapest", cheaper))
    plans: dict[object, tuple[list[Preference], RankedPlan]] = {}
    for name, one in named:
        plans.setdefault(one.candidate, ([], one))[0].append(name)
    return tuple(
        PreferredPlan(preferred_for=tuple(names), ranked=one, fits=_fits(request, one))
        for names, one in plans.values()
    )


def _leaner(request: SearchRequest, first: RankedPlan, *, offload: bool) -> list[RankedPlan]:
    """Return plans that hold less: the best of those within a share of a device's memory."""
    limit = objective_value(request, first.estimate) * _MOST_SLOWER
    found: list[RankedPlan] = []
    for share in _LEAN_SHARES:
        memory = share * request.memory_bytes
        if memory >= first.estimate.bytes_held:
            break
        less = request.with_memory(memory)
        worlds = [first.candidate.devices]
        found = picked(less, offload=offload, below=limit, worlds=worlds, top=1, key=_order)
        if found:
            break
    return found


def _cheaper(request: SearchRequest, first: RankedPlan, *, offload: bool) -> RankedPlan | None:
    """Return the plan on fewer devices that takes the fewest device seconds of a step."""
    if not may_idle(request):
        return None
    priced = replace(request, objective="throughput")
    now = objective_value(priced, first.estimate)
    # On few devices a step takes few device seconds: that sets the bar for others.
    least, all_of_them = _CHEAP_SHARE * first.candidate.devices, first.candidate.devices
    worlds = sorted(count for count in world_sizes(priced) if least <= count < all_of_them)
    below = now * (1.0 - noise())
    some = picked(surely_fitting(priced), offload=offload, below=below, worlds=worlds, top=1)
    return some[0] if some else None


NUM_SIZES = 4  # clusters
NO_SIZE = "no cluster of common devices has a plan: try shorter sequences, or fewer pins"
"""What is said where there are none."""


def four_sizes(
    request_on: Callable[[str], SearchRequest], *, alone: bool = False
) -> list[Recommendation]:
    """Return what to run on each of four clusters; `request_on` makes the request of a name.

    `alone`: without the plans that somebody may prefer. They are fewer where a larger cluster has
    no plan, and none where no cluster of the device has.
    """
    first = f"1x{common_devices()[0]}"
    found = smallest_that_fits(request_on(first))
    if found is None:
        return []
    count, names = found.num_devices, [found.name]
    while len(names) < NUM_SIZES:
        count = 1 << count.bit_length()
        names.append(smallest_cluster(first, count))
    answers: list[Recommendation] = []
    for name in names:
        one = recommend(request_on(name), alone=alone)
        if isinstance(one, Recommendation):
            answers.append(one)
        elif one.interrupted:
            raise KeyboardInterrupt
    return answers
