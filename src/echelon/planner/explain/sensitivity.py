# SPDX-License-Identifier: Apache-2.0
"""Other clusters and batches that would change the answer, each searched for its best plan.

A small space is searched whole for each question. Of a large one what is near the plan is, with
every microbatch in between, and plans of every other kind that did well here (`distant_plans`).
How much faster is by what the request wants, for each token: seconds, or seconds times devices.

Plans far from the best one, such as no pipeline at all, are looked for once, in the world of the
answer, and timed there event by event. In another world their closed forms, times what events made
of them here, say which few pipeline degrees promise most; these are searched there with all else
free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from echelon.config.cluster.settings import named_cluster, smallest_cluster
from echelon.config.entries import Entry
from echelon.core.cluster import Cluster, Device, Link
from echelon.planner.explain.neighbours import (
    CandidateDifference,
    candidate_differences,
    with_recounted_microbatches,
)
from echelon.planner.explain.repeat_search import NEAR, RepeatSearch
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.options import divisors
from echelon.planner.search.pins import Pins
from echelon.planner.search.ranked import RankedPlan, objective_value, pipeline_order
from echelon.planner.search.request import SearchRequest, request_on_cluster
from echelon.planner.search.search import SearchResult, world_sizes
from echelon.planner.search.sweep import SearchSweep

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
    """Return what becomes of the best plan under each question, by default `what_if_requests`."""
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


MEMORY = (0.5, 0.9, 1.25)  # times that of a device
_BANDWIDTH = (0.5, 1.25, 2.0)  # times that of a link
WITHIN = (0.5, 2.0)  # times that inside a node
_PEAK = (0.8, 1.25)  # times that of a device
_LATENCY = (2.0,)  # times that of a link


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Name something that is otherwise, with the request for it and the plan of now under it."""

    name: str
    request: SearchRequest
    current_plan: CandidatePlan


def what_if_requests(request: SearchRequest, choice: CandidatePlan) -> Iterator[WhatIf]:
    """Yield everything that is asked about, for the best plan of a request."""
    for name, changed in _clusters(request.cluster):
        yield WhatIf(name=name, request=replace(request, cluster=changed), current_plan=choice)
    now = request.mathematics.global_sequences
    for count in (2 * now, now // 2):
        if count and (count > now or now % 2 == 0):
            other = with_batch(request, count)
            same = with_recounted_microbatches(other, choice)
            name = f"global batch {now:,} -> {count:,}"
            yield WhatIf(name=name, request=other, current_plan=same)
    larger = with_devices(request, 2 * request.cluster.num_devices)
    if larger is not None and request.pins.values_of("devices") is None:
        mesh = replace(choice.mesh, dp_shard=2 * choice.mesh.dp_shard)
        same = with_recounted_microbatches(larger, replace(choice, mesh=mesh))
        count = larger.cluster.num_devices
        yield WhatIf(name=f"devices {count // 2:,} -> {count:,}", request=larger, current_plan=same)


def with_batch(request: SearchRequest, global_sequences: int) -> SearchRequest:
    """Return the request with another global batch."""
    mathematics = replace(request.mathematics, global_sequences=global_sequences)
    entry = Entry(value=global_sequences, source="a question")
    return replace(
        request,
        one_rank_run=replace(request.one_rank_run, mathematics=mathematics),
        layers=(*request.layers, {"batch.global_sequences": entry}),
    )


def with_devices(request: SearchRequest, count: int) -> SearchRequest | None:
    """Return the request on at least so many of the same devices, None where they have no name."""
    now = request.cluster
    if not isinstance(named_cluster(now.name, ""), Cluster):
        return None
    larger = named_cluster(smallest_cluster(now.name, count), "")
    if not isinstance(larger, Cluster):
        return None
    return request_on_cluster(request, replace(larger, device=now.device))


def _clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    device = cluster.device
    for times in MEMORY:
        memory = int(times * device.memory_bytes)
        yield f"memory {_percent(times)}", _with_device(cluster, memory_bytes=memory)
    if device.peak_flops:
        for times in _PEAK:
            peaks = tuple((dtype, times * peak) for dtype, peak in device.peak_flops)
            yield f"peak FLOP/s {_percent(times)}", _with_device(cluster, peak_flops=peaks)
    node = cluster.devices_per_node
    if cluster.nodes > 1:
        for times in _BANDWIDTH:
            name = f"inter-node bandwidth {_percent(times)}"
            yield name, _with_links(cluster, times, "bandwidth", lambda one: one.degree > node)
    if node > 1:
        for times in WITHIN:
            name = f"intra-node bandwidth {_percent(times)}"
            yield name, _with_links(cluster, times, "bandwidth", lambda one: one.degree <= node)
    if cluster.num_devices > 1:
        for times in _LATENCY:
            yield f"latency {_percent(times)}", _with_links(cluster, times, "latency_s")


def _percent(times: float) -> str:
    return f"x{times:g}" if times in (0.5, 2.0) else f"{100 * (times - 1):+.0f} %"


def _with_device(cluster: Cluster, **changes: object) -> Cluster:
    device: Device = replace(cluster.device, **changes)  # type: ignore[arg-type]
    return replace(cluster, device=device)


def _with_links(
    cluster: Cluster, times: float, name: str, chosen: Callable[[Link], bool] = lambda _: True
) -> Cluster:
    links = tuple(
        replace(link, **{name: times * getattr(link, name)}) if chosen(link) else link
        for link in cluster.links
    )
    return replace(cluster, links=links)
