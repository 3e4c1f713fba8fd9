"""Why a search found nothing, and the least that would have to change.

A pin is to blame where there is a plan without it. Else memory is: then larger clusters of the same
devices are tried, twice as many devices each time and some in between, and changes of the run that
would fit here, the cheapest first. Each of them is a search for whether anything fits at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from echelon.config.cluster.settings import named_cluster, smallest_cluster
from echelon.config.presets import preset_names
from echelon.core.cluster import Cluster
from echelon.core.errors import InfeasiblePlan, Problem
from echelon.core.rulebook.planner import (
    NO_PLAN_IS_LEGAL,
    PIN_EXCLUDES_EVERYTHING,
    PLAN_FITS_MEMORY,
)
from echelon.core.rules import nearest_divisors
from echelon.core.units import binary_bytes
from echelon.planner.search.candidate import ScoredCandidate
from echelon.planner.search.request import SearchRequest, request_on_cluster
from echelon.planner.search.search import SearchResult, walk_worlds
from echelon.planner.search.sweep import SearchSweep

DEGREES = ("tp", "pp", "cp", "dp", "ep")
MOST_TRIED = 4
"""Degrees near a pinned one that are tried."""
MOST_DOUBLINGS = 12  # doublings
BETWEEN = 8  # values between two bounds
_SHORTEST_SEQUENCE = 512  # tokens


def explain_no_plan(answer: SearchResult) -> InfeasiblePlan:
    """Return the error that says why an answer has no plan, and what would help."""
    request = answer.request
    blamed = [name for name in request.pins.values if _fits(request.without_pins(name))]
    if blamed:
        return InfeasiblePlan([_problem_of_pins(request, (name,)) for name in blamed])
    if together := _blamed_together(request):
        return InfeasiblePlan(_problem_of_pins(request, together))
    if answer.num_legal == 0:
        return InfeasiblePlan(_not_legal(answer))
    return InfeasiblePlan(_too_large(answer))


def best_fitting_plan(request: SearchRequest, *, offload: bool = False) -> ScoredCandidate | None:
    """Return the best plan by closed forms, None where nothing fits."""
    sweep = SearchSweep(request, offload=offload, keep=1)
    walk_worlds(sweep)
    ranked = sweep.best.ranked()
    return ranked[0] if ranked else None


def _fits(request: SearchRequest) -> bool:
    return best_fitting_plan(request) is not None


def _blamed_together(request: SearchRequest) -> tuple[str, ...]:
    """Return the fewest pins that there is a plan without, where it takes more than one of them."""
    names = tuple(request.pins.values)
    if len(names) < 2 or not _fits(request.without_pins(*names)):
        return ()
    for count in range(2, len(names)):
        for some in combinations(names, count):
            if _fits(request.without_pins(*some)):
                return some
    return names


def _problem_of_pins(request: SearchRequest, names: Sequence[str]) -> Problem:
    scored = best_fitting_plan(request.without_pins(*names))
    assert scored is not None
    texts = [request.pins.texts[name] for name in names]
    without = "it" if len(names) == 1 else "them"
    return PIN_EXCLUDES_EVERYTHING.problem(
        f"with {' and '.join(texts)} no plan of {request.model.name} on {request.cluster.name} is "
        f"legal and fits; without {without} there is one",
        set_by=" ".join(f"--pin {text}" for text in texts),
        suggestions=(
            " ".join(f"--pin {name}={scored.candidate().pin_value(name)}" for name in names),
            *(_others(request, names[0], scored) if len(names) == 1 else ()),
        ),
    )


def _others(request: SearchRequest, name: str, scored: ScoredCandidate) -> Iterator[str]:
    """Yield other values of a degree that work, those near the pinned one first."""
    pinned = request.pins.values_of(name)
    if name not in DEGREES or not pinned:
        return
    best, wanted = scored.candidate().pin_value(name), int(pinned[0])
    near = nearest_divisors(request.cluster.num_devices, wanted, limit=MOST_TRIED)
    for value in sorted(near, key=lambda one: abs(one - wanted)):
        pins = request.pins.without(name).having(name, value)
        if str(value) != best and _fits(replace(request, pins=pins)):
            yield f"--pin {name}={value}"


def _not_legal(answer: SearchResult) -> Problem:
    request = answer.request
    rules = ", ".join(f"{rule} ({count})" for rule, count in answer.refused.items()) or "none left"
    total = request.mathematics.global_sequences
    world = request.cluster.num_devices
    near = sorted({max(1, total // world) * world, (total // world + 1) * world})
    works = [count for count in near if _fits(_with_mathematics(request, global_sequences=count))]
    return NO_PLAN_IS_LEGAL.problem(
        f"no mesh of {request.model.name} over {world:,} devices is legal: {rules}",
        key="mesh",
        suggestions=tuple(f"batch.global_sequences = {count}" for count in works),
    )


def _with_mathematics(request: SearchRequest, **changes: int) -> SearchRequest:
    mathematics = replace(request.mathematics, **changes)  # type: ignore[arg-type]
    return replace(request, one_rank_run=replace(request.one_rank_run, mathematics=mathematics))


def _too_large(answer: SearchResult) -> Problem:
    request = answer.request
    least, memory = answer.least_bytes, request.memory_bytes
    return PLAN_FITS_MEMORY.problem(
        f"none of {answer.num_legal:,} plans of {request.model.name} fits on "
        f"{request.cluster.name}: the leanest holds {binary_bytes(least)}, a device "
        f"has {binary_bytes(memory)}",
        key="cluster",
        suggestions=[*_larger(request), *_changes(request)],
    )


def _larger(request: SearchRequest) -> Iterator[str]:
    """Yield the smallest cluster of the same devices on which something fits."""
    now = request.cluster
    if not isinstance(named_cluster(now.name, ""), Cluster):
        return
    low, high = now.num_devices, 2 * now.num_devices
    for _ in range(MOST_DOUBLINGS):
        if _fits_on(request, high):
            break
        low, high = high, 2 * high
    else:
        return
    step = max(1, (high - low) // BETWEEN)
    between = (count for count in range(low + step, high, step) if _fits_on(request, count))
    yield f"--cluster {smallest_cluster(now.name, next(between, high))}"


def _fits_on(request: SearchRequest, num_devices: int) -> bool:
    cluster = named_cluster(smallest_cluster(request.cluster.name, num_devices), "")
    if not isinstance(cluster, Cluster):
        return False
    return _fits(_anywhere(request_on_cluster(request, cluster)))


def _anywhere(request: SearchRequest) -> SearchRequest:
    """Return the request on all devices of its cluster."""
    return replace(request.without_pins("devices"), objective="time")


def _changes(request: SearchRequest) -> Iterator[str]:
    """Yield changes of the run, or of the devices, with which something fits."""
    if best_fitting_plan(_anywhere(request.without_pins("offload")), offload=True):
        yield "--pin offload=host"
    length = request.mathematics.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        if _fits(_anywhere(_with_mathematics(request, sequence_length=length))):
            yield f"--set batch.sequence_length={length}"
            break
        length //= 2
    yield from _other_devices(request)


def _other_devices(request: SearchRequest) -> Iterator[str]:
    """Yield as many devices with the least memory that is enough."""
    count, memory = request.cluster.num_devices, request.memory_bytes
    others = (named_cluster(f"{count}x{name}", "") for name in preset_names("clusters"))
    known = [one for one in others if isinstance(one, Cluster)]
    for cluster in sorted(known, key=lambda one: one.device.memory_bytes):
        larger = cluster.device.memory_bytes > memory
        if larger and _fits(_anywhere(request_on_cluster(request, cluster))):
            yield f"--cluster {cluster.name}"
            return
