# SPDX-License-Identifier: Apache-2.0
"""The changes with which a search has a plan where nothing fits, each priced against the leanest.

Each is planned before it is printed, as a search plans it:

1. a pin is freed, all others stay (pairs of pins where no single one is enough);
2. the smallest cluster of the same devices that has a plan (`planner/search/smallest.py`), with
   optimizer state on hosts and without;
3. adapters in the place of all weights; less precision, then shorter sequences;
4. where no freed pin is enough, clusters of devices with more memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations, islice
from typing import TypeAlias

from echelon.config.cluster.devices import common_devices
from echelon.config.cluster.settings import named_cluster
from echelon.config.presets import preset_names
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError
from echelon.planner.explain.fixes import PlanFix, TriedChanges, fix_cost, price_fix, tried_changes
from echelon.planner.search.other_requests import request_with_settings
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import best_fitting_anywhere, first_that_fits
from echelon.planner.search.smallest import (
    SmallestCluster,
    planned,
    smallest_that_fits,
    without_host,
)

Settings: TypeAlias = Mapping[str, object]

MOST_TIMES = 4
"""Times the devices of the smallest cluster, up to which one that needs no host is looked for."""
ROOM = 0.95
"""Share of a device's memory in which other devices, freed pins and other precision must have a
plan by closed forms: a plan that only just fits is no advice, and takes long to find."""
ROOM_OF_LARGE_CHANGES = 0.9
"""The same for shorter sequences, and for other precision on other clusters."""
_SHORTEST_SEQUENCE = 512  # tokens
_LORA: Settings = {"lora.rank": 16}
_LOW_PRECISION: tuple[Settings, ...] = (
    {"precision.parameters": "bf16"},
    {"precision.parameters": "bf16", "precision.gradients": "bf16"},
)
"""Settings with which a run holds less, without a change of its batch, the cheapest first."""
_MOST_FREED = 2  # pins


def changes_that_fit(request: SearchRequest, leanest: RankedPlan) -> Iterator[PlanFix]:
    """Yield changes with which there is a plan, by their kinds, the cheapest of each first."""
    price = partial(price_fix, base=leanest.estimate, offloaded=leanest.candidate.offload)
    freed = sorted(map(price, _freed(request)), key=fix_cost)
    yield from freed
    clusters = [*_same_devices(request)]
    for one in clusters:
        yield price(_on_cluster(one, request))
    yield from map(price, _changes(request, clusters[0] if clusters else None))
    if not freed:
        for one in _other_devices(request):
            yield price(_on_cluster(one, request))


def _freed(request: SearchRequest) -> Iterator[TriedChanges]:
    """Yield the best plan without each pin, or without each two where no single one is enough.

    Pins that the line of a whole plan implies are freed singly only.
    """
    for count in range(1, _MOST_FREED + 1):
        some, pins = False, request.pins
        for names in combinations(pins.values if count == 1 else pins.texts, count):
            free = request.without_pins(*names)
            by_forms = best_fitting_anywhere(free.with_memory(ROOM * free.memory_bytes))
            found = None if by_forms is None else first_that_fits(free)
            if found is not None:
                some, choice = True, found.candidate
                changes = tuple(f"{pins.text(name)} -> {choice.pin_value(name)}" for name in names)
                flags = " ".join(f"--pin {name}={choice.pin_value(name)}" for name in names)
                yield tried_changes(changes, request, choice, flags)
        if some:
            return


def _on_cluster(one: SmallestCluster, request: SearchRequest) -> TriedChanges:
    """Return the plan of another cluster as a change."""
    now = request.cluster
    host = ", optimizer state on the host" * one.offload
    text = f"{now.num_devices:,} -> {one.num_devices:,} devices{host}"
    if one.request.cluster.device.name != now.device.name:
        text = f"{one.num_devices:,} x {one.request.cluster.device.name}{host}"
    return tried_changes((text,), one.request, one.plan.candidate, _as_flags(one, request))


def _as_flags(one: SmallestCluster, request: SearchRequest) -> str:
    """Return the flags of a cluster; a pinned number of devices becomes its number."""
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


def _changes(request: SearchRequest, smallest: SmallestCluster | None) -> Iterator[TriedChanges]:
    """Yield adapters, and the cheapest other change of the run, with which there is a plan here.

    Where only larger clusters have one, it is the change with which a smaller one than `smallest`
    does.
    """
    if (lora := _planned_change(request, _LORA, ROOM)) is not None:
        yield lora
    for settings in _cheaper_runs(request):
        room = ROOM if settings in _LOW_PRECISION else ROOM_OF_LARGE_CHANGES
        if (found := _planned_change(request, settings, room)) is not None:
            yield found
            return
    for settings in _LOW_PRECISION:
        changed = _changed(request, settings)
        if changed is None or smallest is None:
            continue
        cluster = smallest_that_fits(
            changed, most=smallest.num_devices - 1, room=ROOM_OF_LARGE_CHANGES
        )
        if cluster is not None:
            there = _on_cluster(cluster, request)
            changes = (*there.changes, *_as_words(settings, request))
            yield replace(there, changes=changes, flags=f"{there.flags} {_as_settings(settings)}")
            return


def _planned_change(request: SearchRequest, settings: Settings, room: float) -> TriedChanges | None:
    """Return the plan of a run with other settings here; None where it has none."""
    changed = _changed(request, settings)
    plan = None if changed is None else planned(changed, room=room)
    if changed is None or plan is None:
        return None
    return tried_changes(
        _as_words(settings, request), changed, plan.candidate, _as_settings(settings)
    )


def _cheaper_runs(request: SearchRequest) -> Iterator[Settings]:
    """Yield changes of a run that make it hold less, the cheapest first."""
    yield from _LOW_PRECISION
    precisions: tuple[Settings, ...] = ({}, _LOW_PRECISION[-1])
    for precision in precisions:
        length = request.mathematics.sequence_length // 2
        while length >= _SHORTEST_SEQUENCE:
            yield {**precision, "batch.sequence_length": length}
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
    same = changed.mathematics == request.mathematics and changed.model == request.model
    return None if same else changed


def _as_words(settings: Settings, request: SearchRequest) -> tuple[str, ...]:
    """Return each setting of a change in words, without those that a run has already."""
    now = {"precision.parameters": request.mathematics.precision.parameters}
    words = {
        "lora.rank": "LoRA of rank {}",
        "precision.parameters": "parameters in {}",
        "precision.gradients": "gradients in {}",
        "batch.sequence_length": "sequences of {:,} tokens",
    }
    return tuple(
        words[key].format(value) for key, value in settings.items() if now.get(key) != value
    )


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
