"""Why a search found nothing, and the least that would have to change.

A pin is to blame where there is a plan without it. Else memory is: then larger clusters of the same
devices are tried, twice as many devices each time and some in between, and changes of the run that
would fit here, the cheapest first. Each of them is a search for whether anything fits at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from echelon.config.cluster import named_cluster, smallest_cluster
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
from echelon.planner.best import Entrant
from echelon.planner.pins import NO_RECOMPUTE, Pins
from echelon.planner.request import Request, on_cluster
from echelon.planner.search import Answer, worlds_of
from echelon.planner.sweep import Sweep

DEGREES = ("tp", "pp", "cp", "dp", "ep")
MOST_TRIED = 4
"""Degrees near a pinned one that are tried."""
MOST_DOUBLINGS = 12
BETWEEN = 8
SHORTEST_SEQUENCE = 512


def why_nothing(answer: Answer) -> InfeasiblePlan:
    """Return the error that says why an answer has no plan, and what would help."""
    request = answer.request
    blamed = [name for name in request.pins.values if _first_without(request, name) is not None]
    if blamed:
        return InfeasiblePlan([_of_pin(request, name) for name in blamed])
    if together := _blamed_together(request):
        return InfeasiblePlan(_of_pins(request, together))
    if answer.seen == 0:
        return InfeasiblePlan(_not_legal(answer))
    return InfeasiblePlan(_too_large(answer))


def any_plan(request: Request, *, offload: bool = False) -> Entrant | None:
    """Return the best plan by closed forms, None where nothing fits."""
    sweep = Sweep(request, offload=offload, keep=1)
    for world in worlds_of(request):
        sweep.walk(world)
        if sweep.best.found and request.objective == "devices":
            break
    ranked = sweep.best.ranked()
    return ranked[0] if ranked else None


def _first_without(request: Request, name: str) -> Entrant | None:
    return any_plan(replace(request, pins=request.pins.without(name)))


def _blamed_together(request: Request) -> tuple[str, ...]:
    """Return the fewest pins that there is a plan without, where it takes more than one of them."""
    names = tuple(request.pins.values)
    if len(names) < 2 or any_plan(replace(request, pins=Pins(limits=request.pins.limits))) is None:
        return ()
    for count in range(2, len(names)):
        for some in combinations(names, count):
            if any_plan(replace(request, pins=_without(request.pins, some))) is not None:
                return some
    return names


def _without(pins: Pins, names: Sequence[str]) -> Pins:
    for name in names:
        pins = pins.without(name)
    return pins


def _of_pin(request: Request, name: str) -> Problem:
    return _of_pins(request, (name,))


def _of_pins(request: Request, names: Sequence[str]) -> Problem:
    entrant = any_plan(replace(request, pins=_without(request.pins, names)))
    assert entrant is not None
    texts = [request.pins.texts[name] for name in names]
    without = "it" if len(names) == 1 else "them"
    return PIN_EXCLUDES_EVERYTHING.problem(
        f"with {' and '.join(texts)} no plan of {request.model.name} on {request.cluster.name} is "
        f"legal and fits; without {without} there is one",
        set_by=" ".join(f"--pin {text}" for text in texts),
        works=(
            " ".join(f"--pin {name}={_value(entrant, name)}" for name in names),
            *(_others(request, names[0], entrant) if len(names) == 1 else ()),
        ),
    )


def _others(request: Request, name: str, entrant: Entrant) -> Iterator[str]:
    """Yield other values of a degree that work, those near the pinned one first."""
    pinned = request.pins.of(name)
    if name not in DEGREES or not pinned:
        return
    best, wanted = _value(entrant, name), int(pinned[0])
    near = nearest_divisors(request.cluster.num_devices, wanted, limit=MOST_TRIED)
    for value in sorted(near, key=lambda one: abs(one - wanted)):
        pins = request.pins.without(name).having(name, value)
        if str(value) != best and any_plan(replace(request, pins=pins)) is not None:
            yield f"--pin {name}={value}"


def _value(entrant: Entrant, name: str) -> str:
    """Return what a plan has where something else was pinned."""
    choice = entrant.choice()
    words = {
        "recompute": _recompute_word(choice.recompute),
        "sequence_parallel": "on" if choice.sequence_parallel else "off",
        "offload": "host" if choice.offload else "none",
        "reshard": "always" if choice.reshard else "never",
    }
    mesh = choice.mesh
    degrees = {axis: getattr(mesh, axis) for axis in ("tp", "pp", "cp", "ep")}
    degrees |= {"dp": mesh.dp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    found = degrees | {"devices": choice.devices} | words
    return str(found.get(name, getattr(choice, name, "")))


def _recompute_word(every: int) -> str:
    if every == NO_RECOMPUTE:
        return "none"
    return "full" if every == 1 else f"full/{every}"


def _not_legal(answer: Answer) -> Problem:
    request = answer.request
    rules = ", ".join(f"{rule} ({count})" for rule, count in answer.refused.items()) or "none left"
    total = request.mathematics.global_sequences
    world = request.cluster.num_devices
    near = sorted({max(1, total // world) * world, (total // world + 1) * world})
    works = [count for count in near if any_plan(_with_batch(request, count)) is not None]
    return NO_PLAN_IS_LEGAL.problem(
        f"no mesh of {request.model.name} over {world:,} devices is legal: {rules}",
        key="mesh",
        works=tuple(f"batch.global_sequences = {count}" for count in works),
    )


def _with_batch(request: Request, count: int) -> Request:
    mathematics = replace(request.mathematics, global_sequences=count)
    return replace(request, alone=replace(request.alone, mathematics=mathematics))


def _too_large(answer: Answer) -> Problem:
    request = answer.request
    works = [*_larger(request), *_changes(request)]
    least, memory = answer.least_bytes, request.memory_bytes
    return PLAN_FITS_MEMORY.problem(
        f"none of {answer.seen:,} plans of {request.model.name} fits on {request.cluster.name}: "
        f"the leanest holds {binary_bytes(least)}, a device has {binary_bytes(memory)}",
        key="cluster",
        works=works,
    )


def _larger(request: Request) -> Iterator[str]:
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


def _fits_on(request: Request, num_devices: int) -> bool:
    cluster = named_cluster(smallest_cluster(request.cluster.name, num_devices), "")
    if not isinstance(cluster, Cluster):
        return False
    return any_plan(_anywhere(on_cluster(request, cluster))) is not None


def _anywhere(request: Request) -> Request:
    """Return the request on all devices of its cluster."""
    return replace(request, objective="time", pins=request.pins.without("devices"))


def _changes(request: Request) -> Iterator[str]:
    """Yield changes of the run, or of the devices, with which something fits."""
    if any_plan(_anywhere(_with(request, request.pins.without("offload"))), offload=True):
        yield "--pin offload=host"
    length = request.mathematics.sequence_length // 2
    while length >= SHORTEST_SEQUENCE:
        mathematics = replace(request.mathematics, sequence_length=length)
        shorter = replace(request, alone=replace(request.alone, mathematics=mathematics))
        if any_plan(_anywhere(shorter)) is not None:
            yield f"--set batch.sequence_length={length}"
            break
        length //= 2
    yield from _other_devices(request)


def _with(request: Request, pins: Pins) -> Request:
    return replace(request, pins=pins)


def _other_devices(request: Request) -> Iterator[str]:
    """Yield as many devices with the least memory that is enough."""
    count, memory = request.cluster.num_devices, request.memory_bytes
    others = [named_cluster(f"{count}x{name}", "") for name in preset_names("clusters")]
    larger = [
        one for one in others if isinstance(one, Cluster) and one.device.memory_bytes > memory
    ]
    for cluster in sorted(larger, key=lambda one: one.device.memory_bytes):
        if any_plan(_anywhere(on_cluster(request, cluster))) is not None:
            yield f"--cluster {cluster.name}"
            return
