# SPDX-License-Identifier: Apache-2.0
"""Why a search found nothing: the leanest plan in numbers, and the cheapest changes that fit.

If no plan is legal, the error names a pin without which one is. If plans are legal and none fits,
the leanest plan has the missing bytes and its largest terms, and the changes with which a plan
fits.

Changes with which a search has a plan (`changes_that_fit`), each priced against the leanest, and
planned before it is printed, as a search plans it:

1. a pin is freed, all others stay (pairs of pins where no single one is enough);
2. the smallest cluster of the same devices that has a plan, with optimizer state on hosts and
   without;
3. adapters in the place of all weights; less precision, then shorter sequences;
4. where no freed pin is enough, clusters of devices with more memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from math import isinf
from typing import Self, TypeAlias

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
from echelon.planner.explain.fixes import PlanFix, TriedChanges, fix_cost, price_fix, tried_changes
from echelon.planner.explain.sensitivity import with_batch
from echelon.planner.predict.estimate import Estimate
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.ranked import (
    RankedPlan,
    closed_form_plan,
    estimate_candidate,
    with_checked_plan,
)
from echelon.planner.search.request import SearchRequest, request_with_settings
from echelon.planner.search.search import (
    SearchResult,
    SmallestCluster,
    best_fitting_anywhere,
    best_fitting_plan,
    first_that_fits,
    planned,
    smallest_that_fits,
    walk_worlds,
    without_host,
    world_sizes,
)
from echelon.planner.search.sweep import SearchSweep

DEGREES = ("tp", "pp", "cp", "dp", "ep")
MOST_TRIED = 4
"""Degrees near a pinned one that are tried."""
LARGEST_TERMS = 3
"""Terms of the leanest plan that an error names."""
_NEARLY = 1.01
"""Times the least memory in which the fastest plan counts as the leanest."""
_HALVINGS = 8  # times
_ENDLESS = 1e18  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanestPlan:
    """Hold the plan that holds least where none fits, and the changes with which one does."""

    request: SearchRequest
    """The search in which nothing fits."""
    ranked: RankedPlan
    """The fastest of the plans that hold about the least."""
    num_legal: int
    """Plans that rules allow; none of them fits."""
    fixes: tuple[PlanFix, ...]
    """Changes with which a plan fits, the cheapest first of each kind."""

    @property
    def estimate(self) -> Estimate:
        """Return the seconds and bytes of the plan."""
        return self.ranked.estimate

    @property
    def over_bytes(self) -> float:
        """Return the bytes that a device lacks for it."""
        return self.estimate.bytes_held - self.request.memory_bytes

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """Return the bytes of its terms, the largest first."""
        return tuple(sorted(self.estimate.bytes.items(), key=lambda term: -term[1]))


class NothingFits(InfeasiblePlan):
    """Plans are legal, and none of them fits: the search ran, and its answer is no.

    `leanest` is the plan that holds least, with what would fit; None where no model was searched.
    """

    exit_code = 1

    def __init__(self, problems: Problem | Iterable[Problem], leanest: LeanestPlan | None = None):
        """Keep problems, and the plan that they are about."""
        super().__init__(problems)
        self.leanest = leanest

    def with_problems(self, problems: Iterable[Problem]) -> Self:
        """Return the error with other words for its problems."""
        return type(self)(problems, self.leanest)


def explain_no_plan(answer: SearchResult) -> InfeasiblePlan:
    """Return the error that says why an answer has no plan, and what would help."""
    request = answer.request
    if answer.num_legal and (leanest := leanest_plan(answer)) is not None:
        return NothingFits(_problem_of_memory(leanest), leanest)
    blamed = [
        name for name in request.pins.values if best_fitting_anywhere(request.without_pins(name))
    ]
    if blamed:
        return InfeasiblePlan([_problem_of_pins(answer, (name,)) for name in blamed])
    if together := _blamed_together(request):
        return InfeasiblePlan(_problem_of_pins(answer, together))
    return InfeasiblePlan(_not_legal(answer))


def leanest_plan(answer: SearchResult) -> LeanestPlan | None:
    """Return the leanest plan of an answer in which nothing fits, and what makes one fit.

    None where it fits, and another rule refused what closed forms let through.
    """
    request = answer.request
    ranked = leanest_ranked(request)
    if ranked is None or ranked.estimate.bytes_held <= request.memory_bytes:
        return None
    return LeanestPlan(
        request=request,
        ranked=ranked,
        num_legal=answer.num_legal,
        fixes=tuple(changes_that_fit(request, ranked)),
    )


def leanest_ranked(request: SearchRequest) -> RankedPlan | None:
    """Return the fastest of the plans that hold about the least, None where none is legal.

    Its bytes are of lists, not of closed forms.
    """
    pinned = request.pins.values_of("offload") is not None
    least = {offload: _least_bytes(request, offload=offload) for offload in {False, not pinned}}
    offload = min(least, key=lambda one: least[one])
    if isinf(least[offload]):
        return None
    choice = _leanest_choice(request, least[offload], offload=offload)
    closed = closed_form_plan(request, choice)
    try:
        exact = with_checked_plan(request, closed)
    except ConfigError:
        return closed
    # Closed forms may say a little more than lists: a search goes by both.
    return exact if exact.estimate.bytes_held > request.memory_bytes else closed


def _leanest_choice(request: SearchRequest, least: float, *, offload: bool) -> CandidatePlan:
    """Return the best of the plans within the least memory in which one is found.

    `least` is a bound; memory doubles from there until there is a plan, then its bytes and what was
    too little are halved between.
    """
    too_little, room = least, _NEARLY * least + 1.0
    while (scored := best_fitting_plan(request.with_memory(room), offload=offload)) is None:
        too_little, room = room, 2.0 * room
        assert room < _ENDLESS, "an answer with legal plans has a leanest one"
    choice = scored.candidate()
    for _ in range(_HALVINGS):
        enough = estimate_candidate(request, choice).bytes_held
        if enough <= _NEARLY * too_little:
            break
        room = (too_little + enough) / 2.0
        leaner = best_fitting_plan(request.with_memory(room), offload=offload)
        if leaner is None:
            too_little = room
        else:
            choice = leaner.candidate()
    return choice


def _least_bytes(request: SearchRequest, *, offload: bool) -> float:
    """Return a lower bound of the bytes of any plan; infinite without a plan."""
    sweep = SearchSweep(request.with_memory(1.0), offload=offload, keep=1)
    walk_worlds(sweep)
    return sweep.least_bytes


def _problem_of_memory(leanest: LeanestPlan) -> Problem:
    """Return the problem of plans that are legal and too large, with the numbers of the leanest."""
    request, fixes = leanest.request, leanest.fixes
    freed = [fix for fix in fixes if fix.flags.startswith("--pin ")]
    texts = request.pins.texts.values()
    pins = f" with {', '.join(texts)}" if texts else ""
    largest = ", ".join(
        f"{name} {binary_bytes(count)}" for name, count in leanest.terms[:LARGEST_TERMS]
    )
    hosts = [fix for fix in fixes if fix.choice.offload]
    clusters = [fix.flags.split()[1] for fix in hosts if fix.flags.startswith("--cluster ")]
    note = f"; with optimizer state on the host: {', '.join(clusters)}" if clusters else ""
    rule = PIN_EXCLUDES_EVERYTHING if freed else PLAN_FITS_MEMORY
    return rule.problem(
        f"none of {leanest.num_legal:,} plans of {request.model.name} on {request.cluster.name}"
        f"{pins} fits: the leanest holds {binary_bytes(leanest.estimate.bytes_held)}, a device has "
        f"{binary_bytes(request.memory_bytes)}, {binary_bytes(leanest.over_bytes)} too little; "
        f"most of it is {largest}{note}",
        key="" if freed else "cluster",
        set_by=" ".join(dict.fromkeys(request.pins.typed.values())) if freed else "",
        suggestions=dict.fromkeys(fix.flags for fix in fixes),
    )


def _blamed_together(request: SearchRequest) -> tuple[str, ...]:
    """Return the fewest pins without which there is a plan, if that takes more than one."""
    names, every = tuple(request.pins.texts), tuple(request.pins.values)
    if len(every) < 2 or not best_fitting_anywhere(request.without_pins(*every)):
        return ()
    for count in range(2, len(names)):
        for some in combinations(names, count):
            if best_fitting_anywhere(request.without_pins(*some)):
                return some
    return every


def _problem_of_pins(answer: SearchResult, names: Sequence[str]) -> Problem:
    """Return the problem of pins with which no plan is legal, though one is without them."""
    request = answer.request
    scored = best_fitting_anywhere(request.without_pins(*names))
    assert scored is not None
    choice = scored.candidate()
    texts = [request.pins.text(name) for name in names]
    without = "it" if len(names) == 1 else "them"
    because = _rules_met(answer) or ", ".join(_rests(request))
    refused = f" ({because})" if because else ""
    return PIN_EXCLUDES_EVERYTHING.problem(
        f"with {' and '.join(texts)} no plan of {request.model.name} on {request.cluster.name} is "
        f"legal{refused}; without {without} there is one",
        set_by=" ".join(dict.fromkeys(request.pins.typed[name] for name in names)),
        suggestions=(
            " ".join(f"--pin {name}={choice.pin_value(name)}" for name in names),
            *(_others(request, names[0], choice) if len(names) == 1 else ()),
        ),
    )


def _rules_met(answer: SearchResult) -> str:
    """Return the rules that refused meshes, each with how many."""
    return ", ".join(f"{rule} ({count:,})" for rule, count in answer.refused.items())


def _rests(request: SearchRequest) -> Iterator[str]:
    """Yield pinned degrees that do not divide the devices, and experts that a model lacks."""
    if not (counts := world_sizes(request)):
        yield f"{request.cluster.name} has {request.cluster.num_devices:,} devices"
        return
    pinned_experts = {"ep", "expert_tp"} & {*request.pins.values}
    if request.model.experts is None and pinned_experts:
        yield f"{request.model.name} has no experts"
    for name in DEGREES[:-1]:
        pinned = [int(value) for value in request.pins.values.get(name, ())]
        if pinned and all(count % value for count in counts for value in pinned):
            count, value = counts[0], pinned[0]
            yield f"{count:,} devices % {name} {value} = {count % value}"


def _others(request: SearchRequest, name: str, choice: CandidatePlan) -> Iterator[str]:
    """Yield other values of a degree that work, those near the pinned one first."""
    pinned = request.pins.values_of(name)
    if name not in DEGREES or not pinned:
        return
    best, wanted = choice.pin_value(name), int(pinned[0])
    near = nearest_divisors(request.cluster.num_devices, wanted, limit=MOST_TRIED)
    for value in sorted(near, key=lambda one: abs(one - wanted)):
        pins = request.pins.without(name).having(name, value)
        if str(value) != best and best_fitting_anywhere(replace(request, pins=pins)):
            yield f"--pin {name}={value}"


def _not_legal(answer: SearchResult) -> Problem:
    request = answer.request
    rules = _rules_met(answer) or "none left"
    total = request.mathematics.global_sequences
    world = request.cluster.num_devices
    near = sorted({max(1, total // world) * world, (total // world + 1) * world})
    works = [count for count in near if best_fitting_anywhere(with_batch(request, count))]
    return NO_PLAN_IS_LEGAL.problem(
        f"no mesh of {request.model.name} over {world:,} devices is legal: {rules}",
        key="mesh",
        suggestions=tuple(f"batch.global_sequences = {count}" for count in works),
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
    # A pinned number of devices becomes that of the cluster.
    pinned = f" --pin devices={one.num_devices}" if "devices" in request.pins.values else ""
    flags = f"--cluster {one.name}{pinned}"
    return tried_changes((text,), one.request, one.plan.candidate, flags)


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
