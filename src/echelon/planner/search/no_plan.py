"""Why a search found nothing, and the least that would have to change.

A pin is to blame where there is a plan without it. Else memory is: then the smallest cluster of the
same devices that has a plan is looked for (`smallest.py`), with optimizer state on hosts and
without, clusters of devices with more memory, and the cheapest change of the run that has a plan
here: less precision, then shorter sequences. What is told has been planned, as a search plans it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import TypeAlias

from echelon.config.cluster.devices import common_devices
from echelon.config.cluster.settings import named_cluster
from echelon.config.presets import preset_names
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.rulebook.planner import (
    NO_PLAN_IS_LEGAL,
    PIN_EXCLUDES_EVERYTHING,
    PLAN_FITS_MEMORY,
)
from echelon.core.rules import nearest_divisors
from echelon.core.units import binary_bytes
from echelon.planner.search.candidate import ScoredCandidate
from echelon.planner.search.request import SearchRequest, request_with_settings
from echelon.planner.search.search import SearchResult, walk_worlds
from echelon.planner.search.smallest import (
    SmallestCluster,
    planned,
    smallest_that_fits,
    without_host,
)
from echelon.planner.search.sweep import SearchSweep

Settings: TypeAlias = Mapping[str, object]

DEGREES = ("tp", "pp", "cp", "dp", "ep")
MOST_TRIED = 4
"""Degrees near a pinned one that are tried."""
MOST_TIMES = 4
"""Times the devices of the smallest cluster, up to which one that needs no host is looked for."""
ROOM = 0.95
"""Share of a device's memory in which other devices must have a plan by closed forms, and other
precision: what fits only just is no advice, and takes long to find."""
ROOM_OF_LARGE_CHANGES = 0.9
"""The same for shorter sequences, and for other precision on other clusters."""
_SHORTEST_SEQUENCE = 512  # tokens
_LOW_PRECISION: tuple[Settings, ...] = (
    {"precision.parameters": "bf16"},
    {"precision.parameters": "bf16", "precision.gradients": "bf16"},
)
"""What makes a run hold less without a change of its batch, the cheapest first."""


class NothingFits(InfeasiblePlan):
    """Plans are legal, and none of them fits: the search ran, and its answer is no."""

    exit_code = 1


def explain_no_plan(answer: SearchResult) -> InfeasiblePlan:
    """Return the error that says why an answer has no plan, and what would help."""
    request = answer.request
    error = NothingFits if answer.num_legal else InfeasiblePlan
    blamed = [name for name in request.pins.values if _fits(request.without_pins(name))]
    if blamed:
        return error([_problem_of_pins(request, (name,)) for name in blamed])
    if together := _blamed_together(request):
        return error(_problem_of_pins(request, together))
    return error(_not_legal(answer) if answer.num_legal == 0 else _too_large(answer))


def best_fitting_plan(request: SearchRequest, *, offload: bool = False) -> ScoredCandidate | None:
    """Return the best plan by closed forms, None where nothing fits."""
    sweep = SearchSweep(request, offload=offload, keep=1)
    walk_worlds(sweep)
    ranked = sweep.best.ranked()
    return ranked[0] if ranked else None


def _best(request: SearchRequest) -> ScoredCandidate | None:
    """Return the best plan by closed forms, with optimizer state on hosts where nothing fits else.

    That is what a search does, unless pins or its trainer say where that state rests.
    """
    found = best_fitting_plan(request)
    if found is None and request.pins.values_of("offload") is None:
        return best_fitting_plan(request, offload=True)
    return found


def _fits(request: SearchRequest) -> bool:
    return _best(request) is not None


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
    scored = _best(request.without_pins(*names))
    assert scored is not None
    texts = [request.pins.texts[name] for name in names]
    without = "it" if len(names) == 1 else "them"
    return PIN_EXCLUDES_EVERYTHING.problem(
        f"with {' and '.join(texts)} no plan of {request.model.name} on {request.cluster.name} is "
        f"legal and fits; without {without} there is one",
        set_by=" ".join(request.pins.typed[name] for name in names),
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
    clusters = [*_same_devices(request), *_other_devices(request)]
    texts = [_as_flags(one, request) for one in clusters]
    at_hosts = [one.name for one in clusters if one.offload]
    note = f"; with optimizer state on the host: {', '.join(at_hosts)}" if at_hosts else ""
    changes = [*_changes(request, clusters[0] if clusters else None)]
    return PLAN_FITS_MEMORY.problem(
        f"none of {answer.num_legal:,} plans of {request.model.name} fits on "
        f"{request.cluster.name}: the leanest holds {binary_bytes(least)}, a device "
        f"has {binary_bytes(memory)}{note}",
        key="cluster",
        suggestions=[*texts[:1], *changes, *texts[1:]],
    )


def _as_flags(one: SmallestCluster, request: SearchRequest) -> str:
    """Return what to type for a cluster; a pinned number of devices becomes that of the cluster."""
    pinned = f" --pin devices={one.num_devices}" if "devices" in request.pins.values else ""
    return f"--cluster {one.name}{pinned}"


def _same_devices(request: SearchRequest) -> Iterator[SmallestCluster]:
    """Yield the smallest cluster of the same devices that has a plan.

    Where that leaves optimizer state to hosts, the smallest that does not follows.
    """
    found = smallest_that_fits(request)
    if found is None:
        return
    yield found
    if found.offload and request.pins.values_of("offload") is None:
        alone = smallest_that_fits(without_host(request), most=MOST_TIMES * found.num_devices)
        if alone is not None:
            yield alone


def _changes(request: SearchRequest, smallest: SmallestCluster | None) -> Iterator[str]:
    """Yield the cheapest change of the run with which there is a plan here.

    Where only larger clusters do, it is the change with which a smaller one than `smallest` does.
    """
    for settings in _cheaper_runs(request):
        room = ROOM if settings in _LOW_PRECISION else ROOM_OF_LARGE_CHANGES
        changed = _changed(request, settings)
        if changed is not None and planned(changed, room=room) is not None:
            yield _as_settings(settings)
            return
    for settings in _LOW_PRECISION:
        changed = _changed(request, settings)
        if changed is None or smallest is None:
            continue
        found = smallest_that_fits(
            changed, most=smallest.num_devices - 1, room=ROOM_OF_LARGE_CHANGES
        )
        if found is not None:
            yield f"{_as_flags(found, request)} {_as_settings(settings)}"
            return


def _cheaper_runs(request: SearchRequest) -> Iterator[Settings]:
    """Yield changes of a run that make it hold less, the cheapest first."""
    yield from _LOW_PRECISION
    length = request.mathematics.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        yield {"batch.sequence_length": length}
        length //= 2
    length = request.mathematics.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        yield {**_LOW_PRECISION[-1], "batch.sequence_length": length}
        length //= 2


def _changed(request: SearchRequest, settings: Settings) -> SearchRequest | None:
    """Return a request with other settings; None where a rule breaks or its run is the same.

    None too where the devices do not have the dtype.
    """
    if "precision.parameters" in settings and request.cluster.device.flops("bf16") is None:
        return None
    try:
        changed = request_with_settings(request, settings)
    except ConfigError:
        return None
    return None if changed.mathematics == request.mathematics else changed


def _as_settings(settings: Settings) -> str:
    return " ".join(f"--set {key}={value}" for key, value in settings.items())


def _other_devices(request: SearchRequest) -> Iterator[SmallestCluster]:
    """Yield clusters of devices with more memory: two kinds that anybody can rent, if they do.

    As many devices as now at most, where some are enough; of kinds that few have, the one with the
    least memory, only where no common one is enough.
    """
    count = request.cluster.num_devices
    common = [name for name in common_devices() if _has_more_memory(request, name)]
    rare = [
        name
        for name in preset_names("clusters")
        if name not in common_devices() and _has_more_memory(request, name)
    ]
    rare.sort(key=lambda name: _device_of(name).device.memory_bytes)
    for names, kinds, most in ((common, 2, count), (rare, 1, count), (common, 2, None)):
        found = (smallest_that_fits(request, f"1x{name}", most=most, room=ROOM) for name in names)
        some = list(islice((one for one in found if one is not None), kinds))
        if some:
            yield from some
            return


def _has_more_memory(request: SearchRequest, preset: str) -> bool:
    return _device_of(preset).device.memory_bytes > request.memory_bytes


def _device_of(preset: str) -> Cluster:
    """Return one device of a preset as a cluster."""
    found = named_cluster(f"1x{preset}", "")
    assert isinstance(found, Cluster), f"{preset} is a preset"
    return found
