"""Plans on other counts of devices than all: which are walked, the best of each, and of all.

Devices may stay idle where that takes a shorter step. So that a cluster is never slower than a
smaller one of the same devices, the best plan is looked for on every count of which an even cut can
be made, and beside it stands what the best plan on still fewer devices is worth: what is preferred
for being simpler must not be slower than that (`planner/recommend/recommend.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from echelon.core.cluster import Cluster
from echelon.planner.search.ranked import RankedPlan, objective_value, pick_finalists
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult, search
from echelon.planner.search.smallest import something_fits
from echelon.planner.search.sweep import SearchSweep

KEPT = 8  # plans
_BEST_MFU = 0.8
"""No step of a model is known that reaches more of its devices' peak."""
_MOST_COUNTS = 12
"""Counts of devices on which something that fits is looked for, where nothing does on all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCount:
    """Hold the answer on the count of devices with the best plan, and the worth of fewer.

    `fewer` is what the best plan on still fewer devices is worth; infinite where that is far off.
    """

    answer: SearchResult
    fewer: float


def may_idle(request: SearchRequest) -> bool:
    """Return whether devices may stay idle: a short step is asked for, on no pinned count."""
    return request.objective in ("time", "expected") and request.pins.values_of("devices") is None


def even_counts(cluster: Cluster) -> tuple[int, ...]:
    """Return how many devices a plan may take, fewest first: of one node, or of whole nodes.

    Their prime factors are at most 7: what cannot be cut evenly is of no use.
    """
    node = cluster.devices_per_node
    counts = {*range(1, node + 1), *(node * nodes for nodes in range(1, cluster.nodes + 1))}
    return tuple(sorted(count for count in counts if _is_smooth(count)))


def _is_smooth(count: int) -> bool:
    for prime in (2, 3, 5, 7):
        while count % prime == 0:
            count //= prime
    return count == 1


def picked(
    request: SearchRequest,
    *,
    offload: bool,
    below: float,
    worlds: Sequence[int],
    top: int = KEPT,
) -> list[RankedPlan]:
    """Return the first plans of a request that are worth less than `below`, as Plans."""
    sweep = SearchSweep(request, offload=offload, keep=KEPT, below=below)
    for world in worlds:
        sweep.walk(world)
    return pick_finalists(request, sweep.best.ranked(), top=top).ranked


def on_count(request: SearchRequest, count: int) -> SearchRequest:
    """Return the request for plans on so many of its devices."""
    return replace(request, pins=request.pins.having("devices", count))


def on_fewer_that_fit(request: SearchRequest) -> SearchResult | None:
    """Return the answer on the most devices on which a plan fits, where none does on all."""
    if not may_idle(request):
        return None
    for count in even_counts(request.cluster)[-_MOST_COUNTS - 1 :][::-1]:
        fewer = count < request.cluster.num_devices
        if fewer and something_fits(on_count(request, count), count):
            answer = search(on_count(request, count))
            if answer.best is not None or answer.interrupted:
                return replace(answer, request=request)
    return None


def best_count(answer: SearchResult, noise: float) -> BestCount:
    """Return the best answer on the devices of one, or on fewer of them.

    What is worth as much as its first plan but for `noise` counts for `fewer`.
    """
    request, best = answer.request, answer.first
    if not may_idle(request):
        return BestCount(answer=answer, fewer=inf)
    value = objective_value(request, best.estimate)
    found = dict(_best_by_count(request, best, (1.0 + noise) * value, offload=answer.offload))
    count = min(found, key=lambda one: found[one], default=best.candidate.devices)
    if found and found[count] < value:
        fewer = search(on_count(request, count))
        if fewer.best is not None:
            answer = replace(answer, ranked=fewer.ranked, offload=fewer.offload)
    devices = answer.first.candidate.devices
    below = [worth for count, worth in found.items() if count < devices]
    return BestCount(answer=answer, fewer=min(below, default=inf))


def _best_by_count(
    request: SearchRequest, best: RankedPlan, limit: float, *, offload: bool
) -> Iterator[tuple[int, float]]:
    """Yield counts of fewer devices than `best` takes with what their best plan is worth.

    Those that are worth no less than `limit` are left out. Half of the devices are only as fast
    where the batch has nothing left to halve: twice the data ranks take half the sequences each.
    """
    estimate, choice = best.estimate, best.candidate
    least = estimate.model_flops / (_BEST_MFU * estimate.peak_flops * limit)
    if choice.microbatches * choice.microbatch > 1:
        least = max(least, estimate.devices / 2.0)
    for count in reversed(even_counts(request.cluster)):
        if least < count < estimate.devices:
            some = [
                one
                for at_host in {False, offload}
                for one in picked(request, offload=at_host, below=limit, worlds=[count], top=1)
            ]
            worth = min((objective_value(request, one.estimate) for one in some), default=inf)
            if worth < limit:
                yield count, worth
