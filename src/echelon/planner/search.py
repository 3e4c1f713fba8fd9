"""Search: a request becomes an answer, the best plans of a model on a cluster.

`sweep.py` walks every plan by closed forms; the best fifty are then timed event by event
(`simulated.py`), and the first of them become Plans through `config/`, so every rule is checked by
the code that checks a run before it is trained, with the bytes of their lists (`held.py`), by which
it is decided whether they fit. A search that is interrupted answers with what it
has seen until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from echelon.planner.finalists import Picked, pick
from echelon.planner.lattice import divisors
from echelon.planner.ranked import Ranked
from echelon.planner.request import Request
from echelon.planner.sweep import Counts, Sweep

LEANER = (0.9, 0.75, 0.5)
"""Shares of the memory for which plans are looked for again, where finalists hold too much."""
MANY = 256
"""Devices from which on the search of a mixture of experts takes seconds."""
FEW: Mapping[str, int | str] = {
    "schedule": "1f1b",
    "virtual": 1,
    "zero": 1,
    "cp": 1,
    "microbatch": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold what a search found, best first, and what it has seen.

    `refused` counts choices by the rule that forbids them, and plans that hold too much; `rest` are
    finalists that did not become Plans, next best first.
    """

    request: Request
    ranked: tuple[Ranked, ...]
    rest: tuple[Ranked, ...]
    seen: int
    computed: int
    refused: Mapping[str, int]
    seconds: float
    interrupted: bool
    offload: bool
    least_bytes: float

    @property
    def best(self) -> Ranked | None:
        """Return the best plan, None where nothing fits."""
        return self.ranked[0] if self.ranked else None


def search(request: Request) -> Answer:
    """Return the best plans of a request; where nothing fits, an answer without any."""
    started = time.monotonic()
    counts, picked = Counts(), Picked()
    sweep = Sweep(request)
    interrupted = False
    try:
        if request.model.experts is not None and request.cluster.num_devices >= MANY:
            few = _few_of(request)
            sweep = Sweep(few)
            _walk(few, sweep)
        first, sweep = sweep, Sweep(request)
        try:
            picked = _complete(request, sweep)
        except KeyboardInterrupt:
            sweep = sweep if sweep.best.found else first
            raise
        if not picked.ranked and request.pins.of("offload") is None:
            counts, sweep = sweep.counts, Sweep(request, offload=True)
            picked = _complete(request, sweep)
    except KeyboardInterrupt:
        interrupted = True
        picked = pick(request, sweep.best.ranked(), top=1, events=False)
    counts = _together(_together(counts, sweep.counts), Counts(refused=picked.refused))
    return Answer(
        request=request,
        ranked=tuple(picked.ranked),
        rest=tuple(picked.rest),
        seen=counts.seen,
        computed=counts.computed,
        refused={rule: count for rule, count in counts.refused.items() if count},
        seconds=time.monotonic() - started,
        interrupted=interrupted,
        offload=sweep.offload and bool(picked.ranked),
        least_bytes=sweep.least_bytes,
    )


def _complete(request: Request, sweep: Sweep) -> Picked:
    """Walk every plan and return the best; leaner ones where the lists of finalists hold too much.

    Plans that take less memory by closed forms are walked for then, until one fits by its lists.
    """
    _walk(request, sweep)
    picked = pick(request, sweep.best.ranked(), top=request.top)
    for share in LEANER:
        if picked.ranked or not picked.too_large:
            break
        leaner = Sweep(_with_less_memory(request, share), offload=sweep.offload)
        _walk(leaner.request, leaner)
        more = pick(request, leaner.best.ranked(), top=request.top)
        picked = replace(more, refused=picked.refused + more.refused)
    return picked


def _with_less_memory(request: Request, share: float) -> Request:
    device = request.cluster.device
    less = replace(device, memory_bytes=int(share * device.memory_bytes))
    return replace(request, cluster=replace(request.cluster, device=less))


def _few_of(request: Request) -> Request:
    """Return a small part of a search, walked first: an interrupted one then has an answer."""
    pins = request.pins
    for name, value in FEW.items():
        if pins.of(name) is None:
            pins = pins.having(name, value)
    return replace(request, pins=pins)


def worlds_of(request: Request) -> tuple[int, ...]:
    """Return how many devices plans may take, in the order of the search.

    A short step takes all of them. Otherwise any even share of the nodes may do, or of the devices
    of one node.
    """
    cluster = request.cluster
    pinned = request.pins.of("devices")
    if pinned is not None:
        return tuple(int(count) for count in pinned if int(count) <= cluster.num_devices)
    if request.objective == "time":
        return (cluster.num_devices,)
    node = cluster.devices_per_node
    counts = {*divisors(node), *(node * nodes for nodes in divisors(cluster.nodes))}
    return tuple(sorted(counts, reverse=request.objective != "devices"))


def _walk(request: Request, sweep: Sweep) -> None:
    for world in worlds_of(request):
        sweep.walk(world)
        if request.objective == "devices" and sweep.best.found:
            return


def _together(first: Counts, second: Counts) -> Counts:
    return Counts(
        seen=first.seen + second.seen,
        computed=first.computed + second.computed,
        refused=first.refused + second.refused,
    )


def neighbours(answer: Answer) -> Iterator[Ranked]:
    """Yield every finalist but the best, best first."""
    yield from answer.ranked[1:]
    yield from answer.rest
