# SPDX-License-Identifier: Apache-2.0
"""The smallest cluster of some devices on which a run can be planned.

Counts come in the order of a cluster's name: any number of devices of one node, then whole nodes.
No plan is left out on the way, so nothing smaller than what is found has one:

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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from echelon.config.cluster.settings import named_cluster, smallest_cluster
from echelon.core.cluster import Cluster
from echelon.core.parameters import num_parameters
from echelon.core.plan import DTYPE_BYTES
from echelon.planner.search.candidate import BestCandidates
from echelon.planner.search.other_requests import request_on_cluster
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import first_that_fits
from echelon.planner.search.sweep import SearchSweep

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
