# SPDX-License-Identifier: Apache-2.0
"""Search: a request becomes an answer, the best plans of a model on a cluster.

`sweep.py` walks every plan by closed forms; the best fifty are then timed event by event, and the
first of them become Plans (`ranked.py`): every rule is checked by the code that checks a run before
it is trained, and the bytes of their lists decide whether they fit. A search that is interrupted
answers with what it has seen until then.

The front of an answer is plans that no other one beats in time, memory and devices at once: for the
whole cluster and for shares of it the fastest plan that leaves so much of a device's memory free,
without those that another one beats in all three.

The smallest cluster of some devices with a plan (`smallest_that_fits`): counts come in the order of
a cluster's name: any number of devices of one node, then whole nodes. No plan is left out on the
way, so nothing smaller than the result has one:

1. below the bound of the weights alone (each is on some device, whatever shares them out) there is
   no need to look;
2. a count on which no plan fits by closed forms has none: a search looks no further either. Most
   counts end at the least that any mesh holds, which takes milliseconds, and one plan that fits is
   enough;
3. where one fits, plans are made as a search makes them, and the bytes of their lists decide.

Halving an interval would be wrong: 2 devices can do what 3 cannot, because degrees divide what they
cut. So that a run that fits nowhere ends too, counts end at the first of a few doublings that does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from echelon.config.cluster.settings import named_cluster, smallest_cluster
from echelon.core.cluster import Cluster
from echelon.core.parameters import num_parameters
from echelon.core.plan import DTYPE_BYTES
from echelon.planner.search.candidate import BestCandidates, ScoredCandidate
from echelon.planner.search.options import divisors
from echelon.planner.search.ranked import PickedPlans, RankedPlan, closed_form_plan, pick_finalists
from echelon.planner.search.request import SearchRequest, request_on_cluster
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


MOST_DOUBLINGS = 12  # doublings
_ON_DEVICES = 0
"""What stands for `offload=none` in pins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestCluster:
    """Hold a request on the smallest cluster that has a plan, and one of its plans."""

    request: SearchRequest
    plan: RankedPlan

    @property
    def name(self) -> str:
        """Return the name of the cluster."""
        return self.request.cluster.name

    @property
    def num_devices(self) -> int:
        """Return how many devices it has."""
        return self.request.cluster.num_devices

    @property
    def offload(self) -> bool:
        """Return whether optimizer state rests on the host, because nothing fits else."""
        return self.plan.candidate.offload


@dataclass(slots=True)
class _FirstCandidates(BestCandidates):
    """Take the first plans that fit, and let no other be better."""

    def drop_surplus(self) -> None:
        """Stop at what was found."""
        if self.found:
            self.threshold = float("-inf")


def anything_fits(request: SearchRequest) -> bool:
    """Return whether a plan over all devices of a request fits, by closed forms."""
    return something_fits(on_all_devices(request), request.cluster.num_devices)


def something_fits(request: SearchRequest, count: int) -> bool:
    """Return whether a plan over so many devices of a request fits, by closed forms.

    Where a search would let optimizer state rest on the host, such plans count too.
    """
    pinned = request.pins.values_of("offload") is not None
    for offload in (False,) if pinned else (False, True):
        sweep = SearchSweep(request, offload=offload)
        sweep.best = _FirstCandidates()
        sweep.walk(count)
        if sweep.best.found:
            return True
    return False


def on_all_devices(request: SearchRequest) -> SearchRequest:
    """Return the request for a short step on all devices of its cluster."""
    return replace(request.without_pins("devices"), objective="time")


def least_devices(request: SearchRequest) -> int:
    """Return a count of devices below which not even the weights fit."""
    element = DTYPE_BYTES[request.mathematics.precision.parameters]
    return max(1, ceil(num_parameters(request.model) * element / request.memory_bytes))


def clusters_of_devices(name: str, least: int = 1) -> Iterator[Cluster]:
    """Yield the clusters of the devices of `name`, by their size, from `least` devices on."""
    count = least
    while isinstance(cluster := named_cluster(smallest_cluster(name, count), ""), Cluster):
        yield cluster
        count = cluster.num_devices + 1


def smallest_that_fits(
    request: SearchRequest, name: str = "", *, most: int | None = None, room: float = 1.0
) -> SmallestCluster | None:
    """Return the smallest cluster of the devices of `name` on which a request has a plan.

    Without a name the devices are those of the request. None where no cluster of at most `most`
    devices does, or where the devices have no name, as those of a cluster file. With `room` below 1
    closed forms must find a plan in that share of the memory: what fits only just, whose lists take
    long to count, is left out.
    """
    name = name or request.cluster.name
    first = named_cluster(name, "")
    if not isinstance(first, Cluster):
        return None
    device = request.cluster.device if name == request.cluster.name else first.device
    wanted = request_on_cluster(request, replace(first, device=device))
    most = _enough_devices(wanted) if most is None else most
    for cluster in clusters_of_devices(name, least_devices(wanted)):
        if most is None or cluster.num_devices > most:
            return None
        here = request_on_cluster(request, replace(cluster, device=device))
        if (plan := planned(here, room=room)) is not None:
            return SmallestCluster(request=here, plan=plan)
    return None


def planned(request: SearchRequest, *, room: float = 1.0) -> RankedPlan | None:
    """Return a plan over all devices of a request where a search finds one, with so much room."""
    if not anything_fits(request.with_memory(room * request.memory_bytes)):
        return None
    return first_that_fits(on_all_devices(request))


def without_host(request: SearchRequest) -> SearchRequest:
    """Return the request with optimizer state on the devices, whatever fits there."""
    return replace(request, pins=request.pins.having("offload", _ON_DEVICES))


def _enough_devices(request: SearchRequest) -> int | None:
    """Return twice the first of some doublings on which something fits by closed forms.

    Twice, because bytes of lists are a little more than closed forms say.
    """
    count = least_devices(request)
    for _ in range(MOST_DOUBLINGS):
        name = smallest_cluster(request.cluster.name, count)
        cluster = named_cluster(name, "")
        if not isinstance(cluster, Cluster):
            return None
        here = replace(cluster, device=request.cluster.device)
        if anything_fits(request_on_cluster(request, here)):
            return 2 * cluster.num_devices
        count = 2 * cluster.num_devices
    return None
