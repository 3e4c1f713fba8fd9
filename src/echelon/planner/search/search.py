# SPDX-License-Identifier: Apache-2.0
"""Search: a request becomes an answer, the best plans of a model on a cluster.

`sweep.py` walks every plan by closed forms; the best fifty are then timed event by event, and the
first of them become Plans (`ranked.py`): every rule is checked by the code that checks a run before
it is trained, and the bytes of their lists decide whether they fit. A search that is interrupted
answers with what it has seen until then.

The front of an answer is plans that no other one beats in time, memory and devices at once: for the
whole cluster and for shares of it the fastest plan that leaves so much of a device's memory free,
without those that another one beats in all three.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from echelon.planner.search.candidate import ScoredCandidate
from echelon.planner.search.legal_meshes import divisors
from echelon.planner.search.ranked import PickedPlans, RankedPlan, closed_form_plan, pick_finalists
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.sweep import SearchCounts, SearchSweep
from echelon.schedule.build import PLAIN_SCHEDULE

_ROOM_SHARES = (0.75, 0.5, 0.25, 0.05)
"""Shares of what the leanest plan leaves free, with which plans are looked for again, where
finalists hold too much."""
_MOST_LEANER = 8
"""Plans of each that may hold too much by their lists."""
MANY = 256
"""Devices from which on the search of a mixture of experts takes seconds."""
_SMALL_SEARCH_PINS: Mapping[str, int | str] = {
    "schedule": PLAIN_SCHEDULE,
    "virtual": 1,
    "zero": 1,
    "cp": 1,
    "microbatch": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Hold what a search found, best first, and what it has seen."""

    request: SearchRequest
    """What it was about."""
    ranked: tuple[RankedPlan, ...]
    """The best plans."""
    other_finalists: tuple[RankedPlan, ...]
    """Finalists that did not become Plans, next best first."""
    num_legal: int
    """Choices that rules allow."""
    num_computed: int
    """Choices whose seconds and bytes were computed in full."""
    refused: Mapping[str, int]
    """Choices by the rule that forbids them, and plans that hold too much."""
    seconds: float
    """Seconds that it took."""
    interrupted: bool
    """Whether it was stopped before its end."""
    offload: bool
    """Whether these keep optimizer state on the host, because no others fit."""
    least_bytes: float
    """Bytes of the fullest rank of the plan that holds least."""

    @property
    def best(self) -> RankedPlan | None:
        """Return the best plan, None where nothing fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def first(self) -> RankedPlan:
        """Return the best plan of an answer that has one."""
        return self.ranked[0]


def search(request: SearchRequest) -> SearchResult:
    """Return the best plans of a request; where nothing fits, an answer without any."""
    started = time.monotonic()
    counts, picked = SearchCounts(), PickedPlans()
    sweep = SearchSweep(request)
    interrupted = False
    try:
        if request.model.experts is not None and request.cluster.num_devices >= MANY:
            sweep = SearchSweep(_small_search(request))
            walk_worlds(sweep)
        first, sweep = sweep, SearchSweep(request)
        try:
            picked = _complete(request, sweep)
        except KeyboardInterrupt:
            sweep = sweep if sweep.best.found else first
            raise
        if not picked.ranked and request.pins.values_of("offload") is None:
            counts, sweep = sweep.counts, SearchSweep(request, offload=True)
            picked = _complete(request, sweep)
    except KeyboardInterrupt:
        interrupted = True
        picked = pick_finalists(request, sweep.best.ranked(), top=1, events=False)
    parts = (counts, sweep.counts)
    refused = counts.refused + sweep.counts.refused + picked.refused
    return SearchResult(
        request=request,
        ranked=tuple(picked.ranked),
        other_finalists=tuple(picked.rest),
        num_legal=sum(part.seen for part in parts),
        num_computed=sum(part.computed for part in parts),
        refused=dict(refused),
        seconds=time.monotonic() - started,
        interrupted=interrupted,
        offload=sweep.offload and bool(picked.ranked),
        least_bytes=sweep.least_bytes,
    )


def first_that_fits(request: SearchRequest) -> RankedPlan | None:
    """Return a plan that fits where a search finds any: the best one, if closed forms are right."""
    pinned = request.pins.values_of("offload") is not None
    for offload in (False,) if pinned else (False, True):
        sweep = SearchSweep(request, offload=offload)
        picked = _complete(replace(request, top=1), sweep, events=False)
        if picked.ranked:
            return picked.ranked[0]
    return None


def best_fitting_plan(request: SearchRequest, *, offload: bool = False) -> ScoredCandidate | None:
    """Return the best plan by closed forms, None where nothing fits."""
    sweep = SearchSweep(request, offload=offload, keep=1)
    walk_worlds(sweep)
    ranked = sweep.best.ranked()
    return ranked[0] if ranked else None


def best_fitting_anywhere(request: SearchRequest) -> ScoredCandidate | None:
    """Return the best plan by closed forms, with optimizer state on hosts where nothing fits else.

    A search does the same, unless pins or its trainer decide where that state is.
    """
    found = best_fitting_plan(request)
    if found is None and request.pins.values_of("offload") is None:
        return best_fitting_plan(request, offload=True)
    return found


def _complete(request: SearchRequest, sweep: SearchSweep, *, events: bool = True) -> PickedPlans:
    """Walk every plan and return the best; leaner ones where the lists of finalists hold too much.

    Plans that take less memory by closed forms are walked for then, until one fits by its lists.
    """
    walk_worlds(sweep)
    picked = pick_finalists(request, sweep.best.ranked(), top=request.top, events=events)
    memory, least = request.memory_bytes, sweep.least_bytes
    for share in _ROOM_SHARES:
        if picked.ranked or not picked.too_large:
            break
        leaner = SearchSweep(
            request.with_memory(least + share * (memory - least)), offload=sweep.offload
        )
        walk_worlds(leaner)
        more = pick_finalists(
            request, leaner.best.ranked(), top=request.top, events=events, most=_MOST_LEANER
        )
        picked = replace(more, refused=picked.refused + more.refused)
    return picked


def _small_search(request: SearchRequest) -> SearchRequest:
    """Return a small part of a search, walked first: an interrupted one then has an answer."""
    pins = request.pins
    for name, value in _SMALL_SEARCH_PINS.items():
        if pins.values_of(name) is None:
            pins = pins.having(name, value)
    return replace(request, pins=pins)


def world_sizes(request: SearchRequest) -> tuple[int, ...]:
    """Return how many devices plans may take, in the order of the search.

    A short step takes all of them. Otherwise any even share of the nodes may do, or of the devices
    of one node.
    """
    cluster = request.cluster
    pinned = request.pins.values_of("devices")
    if pinned is not None:
        return tuple(int(count) for count in pinned if int(count) <= cluster.num_devices)
    if request.on_all_devices:
        return (cluster.num_devices,)
    node = cluster.devices_per_node
    counts = {*divisors(node), *(node * nodes for nodes in divisors(cluster.nodes))}
    return tuple(sorted(counts, reverse=request.objective != "devices"))


def walk_worlds(sweep: SearchSweep) -> None:
    """Walk every plan of a request; the fewest devices that do are enough where few are wanted."""
    for world in world_sizes(sweep.request):
        sweep.walk(world)
        if sweep.request.objective == "devices" and sweep.best.found:
            return


_LEVELS = (1.0, 0.75, 0.5, 0.25)
"""Shares of a device's memory that a plan may take."""
_MOST_WORLDS = 4  # world sizes


def pareto_front(request: SearchRequest) -> tuple[RankedPlan, ...]:
    """Return the plans of the front: most devices first, then the shortest step first."""
    worlds = world_sizes(replace(request, objective="throughput"))[:_MOST_WORLDS]
    found = [one for world in worlds for one in _front_of_world(request, world)]
    kept = [one for one in found if not any(_dominates(other, one) for other in found)]
    return tuple(sorted(kept, key=lambda one: (-one.candidate.devices, one.estimate.step_s)))


def _front_of_world(request: SearchRequest, world: int) -> list[RankedPlan]:
    found: list[RankedPlan] = []
    limit = request.memory_bytes
    for level in _LEVELS:
        memory = level * request.memory_bytes
        if memory > limit:
            continue
        sweep = SearchSweep(request.with_memory(memory), keep=1)
        sweep.walk(world)
        ranked = sweep.best.ranked()
        if not ranked:
            break
        found.append(closed_form_plan(request, ranked[0].candidate()))
        # A plan that needs less than the next level is the best of that level too.
        limit = found[-1].estimate.bytes_held
    return found


def _dominates(one: RankedPlan, other: RankedPlan) -> bool:
    first, second = (
        (plan.estimate.step_s, plan.estimate.bytes_held, plan.candidate.devices)
        for plan in (one, other)
    )
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))
