# SPDX-License-Identifier: Apache-2.0
"""Plans on other counts of devices than all: which are walked, the best of each, and of all.

Devices may stay idle where that takes a shorter step. So that a cluster is never slower than a
smaller one of the same devices, the best plan is looked for on every count of which an even cut can
be made, and beside it stand those on still fewer devices that are nearly as good: what is preferred
for being simpler must not be slower than what is preferred there (`recommend.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from echelon.core.cluster import Cluster
from echelon.core.parameters import num_parameters
from echelon.cost.inputs.numbers import first_number
from echelon.planner.search.candidate import ScoredCandidate
from echelon.planner.search.ranked import (
    PlanKey,
    RankedPlan,
    objective_value,
    pick_finalists,
    ranking_key,
)
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult, search, something_fits, without_host
from echelon.planner.search.sweep import SearchSweep

KEPT = 8  # plans
_BEST_MFU = 0.8
"""No step of a model is known that reaches more of its devices' peak."""
_SLOW_COUNTS = 3
"""Counts of devices in a row on which no plan is fast enough, below which there is none either.

These counts reach down to half of the last fast enough one: a mesh of 131,072 devices has a
counterpart on 65,536 with one axis half as long, while none may suit the counts between them.
"""
_SCARCE = 0.5
"""Share of the memory of devices that model states take, above which fewer may need hosts."""
_BY_EVENTS = 1.03
"""How many times as long a pipeline may take by its closed form as by its events."""
_MOST_COUNTS = 12
"""Counts of devices on which something that fits is looked for, where plans of all of them do not:
on far fewer they fit less. Where rules allow none of all, few devices may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansOnCount:
    """Hold what the best plan on a count of devices is worth, and what gives the first plans there.

    `offload` says whether their optimizer state is with the host.
    """

    devices: int
    worth: float
    offload: bool
    pick: Callable[[int], Sequence[RankedPlan]]
    """What gives so many of the plans, best first: each is checked, so few should be asked for."""

    @property
    def plans(self) -> Sequence[RankedPlan]:
        """Return the first plans."""
        return self.pick(KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCount:
    """Hold the answer on the count of devices with the best plan, and nearly as good ones on fewer.

    `fewer` are in the order of their devices, the fewest first.
    """

    answer: SearchResult
    fewer: tuple[PlansOnCount, ...] = ()


def may_idle(request: SearchRequest) -> bool:
    """Return whether devices may stay idle: a short step is asked for, on no pinned count."""
    return request.on_all_devices and request.pins.values_of("devices") is None


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
    key: PlanKey = ranking_key,
) -> list[RankedPlan]:
    """Return the first plans of a request that are worth less than `below`, as Plans.

    They are `top` of the best of them, in the order of `key`; what is not asked for is not made.
    """
    sweep = SearchSweep(request, offload=offload, keep=KEPT, below=below)
    for world in worlds:
        sweep.walk(world)
    return pick_finalists(request, sweep.best.ranked(), top=top, key=key).ranked


def on_count(request: SearchRequest, count: int) -> SearchRequest:
    """Return the request for plans on so many of its devices."""
    return replace(request, pins=request.pins.having("devices", count))


def on_fewer_that_fit(nothing: SearchResult) -> SearchResult | None:
    """Return the answer on the most devices on which a plan fits, where `nothing` does on all."""
    request = nothing.request
    if not may_idle(request):
        return None
    counts = even_counts(request.cluster)[::-1]
    for count in counts[: _MOST_COUNTS + 1] if nothing.num_legal else counts:
        fewer = count < request.cluster.num_devices
        if fewer and something_fits(on_count(request, count), count):
            answer = search(on_count(request, count))
            if answer.best is not None or answer.interrupted:
                return replace(answer, request=request)
    return None


def best_count(answer: SearchResult, noise: float) -> BestCount:
    """Return the best answer on the devices of one, or on fewer of them.

    What is worth as much as its first plan but for `noise` counts for `fewer`. Where memory is so
    scarce that fewer devices have no plan but with optimizer state on the host, such plans are
    looked at on more devices too: with all of it on them, more devices could be slower.
    """
    request = answer.request
    if not may_idle(request):
        return BestCount(answer=answer)
    limit = (1.0 + noise) * _worth(answer)
    if not answer.offload and _needs_host(answer, limit):
        at_host = _at_host(request)
        if at_host is not None and _worth(at_host) < _worth(answer):
            answer = at_host
            limit = (1.0 + noise) * _worth(answer)
        elsewhere = (False, True)
    else:
        elsewhere = (False, True) if answer.offload else (False,)
    found = [*_best_by_count(answer, limit, elsewhere)]
    best = min(found, key=lambda one: one.worth, default=None)
    if best is not None and best.worth < _worth(answer):
        here = on_count(request, best.devices)
        fewer = _at_host(here) if best.offload else _searched(here)
        if fewer is not None and fewer.best is not None:
            answer = replace(answer, ranked=fewer.ranked, offload=fewer.offload)
    devices = answer.first.candidate.devices
    below = sorted(found, key=lambda one: one.devices)
    return BestCount(answer=answer, fewer=tuple(one for one in below if one.devices < devices))


def _worth(answer: SearchResult) -> float:
    return objective_value(answer.request, answer.first.estimate)


def _searched(request: SearchRequest) -> SearchResult:
    """Return the answer of a search; KeyboardInterrupt where it was stopped, as the rest is."""
    found = search(request)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


def _at_host(request: SearchRequest) -> SearchResult | None:
    """Return the answer with optimizer state on the host; None where that has no plan."""
    found = _searched(replace(request, pins=request.pins.having("offload", 1)))
    return None if found.best is None else replace(found, request=request, offload=True)


def _needs_host(answer: SearchResult, limit: float) -> bool:
    """Return whether fewer devices have plans only with optimizer state on the host."""
    request, estimate = answer.request, answer.first.estimate
    if request.pins.values_of("offload") is not None:
        return False
    software = estimate.inputs.software
    each = software.element_bytes + software.gradient_bytes + software.state_bytes
    state = num_parameters(request.model) * first_number(each)
    devices = without_host(request)
    for count in _counts_between(answer, limit):
        scarce = state > _SCARCE * count * request.memory_bytes
        if scarce and not something_fits(devices, count) and something_fits(request, count):
            return True
    return False


def _counts_between(answer: SearchResult, limit: float) -> Iterator[int]:
    """Yield counts of fewer devices than those of an answer on which a step may take `limit`."""
    estimate = answer.first.estimate
    least = estimate.model_flops / (_BEST_MFU * estimate.peak_flops * limit)
    for count in reversed(even_counts(answer.request.cluster)):
        if least < count < estimate.devices:
            yield count


def _best_by_count(
    answer: SearchResult, limit: float, at_host: Sequence[bool]
) -> Iterator[PlansOnCount]:
    """Yield the first plans on counts of fewer devices than those of an answer.

    Plans that are worth no less than `limit` are left out, and what is below counts on which no
    plan can be.
    """
    request, slow = answer.request, 0
    fast = answer.first.estimate.devices
    for count in _counts_between(answer, limit):
        best, fast_enough, legal = None, False, False
        for offload in at_host:
            sweep = SearchSweep(request, offload=offload, keep=KEPT, below=_BY_EVENTS * limit)
            sweep.walk(count)
            legal |= sweep.counts.seen > 0
            fast_enough |= sweep.counts.computed > 0
            pick = partial(_first_plans, request, sweep.best.ranked())
            for first in pick(1):
                worth = objective_value(request, first.estimate)
                one = PlansOnCount(devices=count, worth=worth, offload=offload, pick=pick)
                best = one if best is None or worth < best.worth else best
        if best is not None and best.worth < limit:
            yield best
        slow, fast = (0, count) if fast_enough else (slow + legal, fast)
        if slow >= _SLOW_COUNTS and 2 * count <= fast:
            return


def _first_plans(
    request: SearchRequest, finalists: Sequence[ScoredCandidate], count: int
) -> Sequence[RankedPlan]:
    return pick_finalists(request, finalists, top=count).ranked
