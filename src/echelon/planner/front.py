"""The front of an answer: plans that no other one beats in time, memory and devices at once.

For the whole cluster and for shares of it, the fastest plan is looked for that leaves so much of a
device's memory free; what another one beats in all three is dropped.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.planner.ranked import Ranked, estimate_choice
from echelon.planner.request import Request
from echelon.planner.search import worlds_of
from echelon.planner.sweep import Sweep

LEVELS = (1.0, 0.75, 0.5, 0.25)
"""Shares of a device's memory that a plan may take."""
MOST_WORLDS = 4


def front_of(request: Request) -> tuple[Ranked, ...]:
    """Return the plans of the front: most devices first, then the shortest step first."""
    worlds = worlds_of(replace(request, objective="throughput"))[:MOST_WORLDS]
    found = [one for world in worlds for one in _of_world(request, world)]
    kept = [one for one in found if not any(_beats(other, one) for other in found)]
    return tuple(sorted(kept, key=lambda one: (-one.choice.devices, one.estimate.step_s)))


def _of_world(request: Request, world: int) -> list[Ranked]:
    found: list[Ranked] = []
    limit = request.memory_bytes
    for level in LEVELS:
        memory = level * request.memory_bytes
        if memory > limit:
            continue
        device = replace(request.cluster.device, memory_bytes=int(memory))
        leaner = replace(request, cluster=replace(request.cluster, device=device))
        sweep = Sweep(leaner, keep=1)
        sweep.walk(world)
        ranked = sweep.best.ranked()
        if not ranked:
            break
        choice = ranked[0].choice()
        found.append(
            Ranked(choice=choice, estimate=estimate_choice(request, choice), simulated=False)
        )
        # A plan that needs less than the next level is the best of that level too.
        limit = found[-1].estimate.bytes_held
    return found


def _beats(one: Ranked, other: Ranked) -> bool:
    first, second = _costs(one), _costs(other)
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))


def _costs(one: Ranked) -> tuple[float, float, float]:
    return one.estimate.step_s, one.estimate.bytes_held, float(one.choice.devices)
