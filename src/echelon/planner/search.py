"""Search: a request becomes an answer, the best plans of a model on a cluster.

`sweep.py` walks every plan by closed forms; the best fifty are then timed event by event
(`simulated.py`), and the first of them become Plans through `config/`, so every rule is checked by
the code that checks a run before it is trained. A search that is interrupted answers with what it
has seen until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.cost.balance import split_layers
from echelon.cost.lattice.block import Work
from echelon.cost.lattice.of_cluster import machine_numbers
from echelon.cost.lattice.of_model import model_numbers
from echelon.planner.best import Entrant
from echelon.planner.choice import Choice
from echelon.planner.estimate import Estimate, estimate_work
from echelon.planner.lattice import divisors
from echelon.planner.request import Request
from echelon.planner.simulated import (
    Stages,
    busy_s,
    cut_stages,
    simulated,
    unit_times,
    with_simulated,
)
from echelon.planner.sweep import Counts, Sweep

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
class Ranked:
    """Hold a plan of an answer: its choices, what it takes, and whether events were timed.

    `stages` are the blocks of each stage, none yet where nobody has asked.
    """

    choice: Choice
    estimate: Estimate
    simulated: bool
    stages: Stages = ()
    plan: Plan | None = None


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
    interrupted = offload = False
    sweep = first = Sweep(request)
    try:
        if request.model.experts is not None and request.cluster.num_devices >= MANY:
            few = _few_of(request)
            first = Sweep(few)
            _walk(few, first)
        _walk(request, sweep)
        if not sweep.best.found and request.pins.of("offload") is None:
            leaner = Sweep(request, offload=True)
            _walk(request, leaner)
            if leaner.best.found:
                leaner.counts = _together(sweep.counts, leaner.counts)
                sweep, offload = leaner, True
    except KeyboardInterrupt:
        interrupted = True
        if not sweep.best.found:
            sweep = first
    entrants = sweep.best.ranked()
    try:
        finalists = _timed(request, entrants, events=not interrupted)
        ranked, rest = _as_plans(request, finalists, sweep.counts)
    except KeyboardInterrupt:
        interrupted = True
        finalists = _timed(request, entrants, events=False)
        ranked, rest = _as_plans(replace(request, top=1), finalists, sweep.counts)
    return Answer(
        request=request,
        ranked=tuple(ranked),
        rest=tuple(rest),
        seen=sweep.counts.seen,
        computed=sweep.counts.computed,
        refused={rule: count for rule, count in sweep.counts.refused.items() if count},
        seconds=time.monotonic() - started,
        interrupted=interrupted,
        offload=offload,
        least_bytes=sweep.least_bytes,
    )


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


def work_of_choice(request: Request, choice: Choice) -> Work:
    """Return what the formulas read of one plan of a search."""
    length = request.mathematics.sequence_length
    return Work(
        model=model_numbers(request.model, length, tp=float(choice.mesh.tp)),
        machine=machine_numbers(
            request.cluster, request.mathematics.precision.parameters, ranks=choice.devices
        ),
        software=request.software,
        layout=choice.numbers(),
    )


def estimate_choice(request: Request, choice: Choice) -> Estimate:
    """Return what one plan of a search takes, by closed forms."""
    work = work_of_choice(request, choice)
    return estimate_work(work, request.mathematics, request.cluster)


def _timed(request: Request, entrants: Sequence[Entrant], *, events: bool) -> list[Ranked]:
    """Return plans by what they are worth, those first in line timed event by event."""
    found: list[Ranked] = []
    for entrant in entrants:
        choice = entrant.choice()
        estimate = estimate_choice(request, choice)
        one = Ranked(choice=choice, estimate=estimate, simulated=False)
        if choice.mesh.pp > 1 and events:
            one = by_events(request, one)
        found.append(one)
    return sorted(found, key=lambda one: _place(request, one))


def by_events(request: Request, one: Ranked) -> Ranked:
    """Return a plan of a pipeline that closed forms have timed, timed event by event."""
    choice, estimate = one.choice, one.estimate
    times = unit_times(choice, estimate.work, request.model)
    stages = cut_stages(choice, times, request.model.layers)
    seconds, busy = simulated(choice, times, stages), busy_s(choice, times)
    estimate = replace(estimate, seconds=with_simulated(estimate.seconds, seconds, busy))
    return replace(one, estimate=estimate, simulated=True, stages=stages)


def _place(request: Request, one: Ranked) -> tuple[float, ...]:
    """Return where a plan belongs: by its worth, and among equals the simpler one first."""
    mesh = one.choice.mesh
    value = float(f"{worth(request, one.estimate):.4g}")
    return (value, mesh.cp, mesh.tp, mesh.pp, one.choice.virtual, one.estimate.bytes_held)


def worth(request: Request, estimate: Estimate) -> float:
    """Return what a plan is worth under the objective of a request; less is better."""
    weighted = request.objective in ("throughput", "cost")
    return estimate.step_s * (estimate.devices if weighted else 1)


def _as_plans(
    request: Request, finalists: Sequence[Ranked], counts: Counts
) -> tuple[list[Ranked], list[Ranked]]:
    """Return the first finalists as Plans, and the others; what a rule refuses is counted."""
    ranked: list[Ranked] = []
    rest: list[Ranked] = []
    for finalist in finalists:
        one = finalist
        if len(ranked) >= request.top:
            rest.append(one)
            continue
        if not one.stages and one.choice.mesh.pp > 1:
            times = unit_times(one.choice, one.estimate.work, request.model)
            one = replace(one, stages=cut_stages(one.choice, times, request.model.layers))
        try:
            ranked.append(replace(one, plan=plan_of(request, one)))
        except ConfigError as error:
            counts.refused.update(error.rules)
    return ranked, rest


def plan_of(request: Request, ranked: Ranked) -> Plan:
    """Return a plan of an answer as a Plan, checked by every rule."""
    return request.job(settings_of(request, ranked)).plan


def settings_of(request: Request, ranked: Ranked) -> dict[str, object]:
    """Return the settings that give a plan of an answer; an even cut of blocks is said so."""
    layers, stages = request.model.layers, ranked.stages
    settings = ranked.choice.settings(has_experts=request.model.experts is not None)
    if stages:
        even = stages == split_layers(layers, len(stages))
        settings["pipeline.stages"] = "even" if even else [list(stage) for stage in stages]
    return settings


def neighbours(answer: Answer) -> Iterator[Ranked]:
    """Yield every finalist but the best, best first."""
    yield from answer.ranked[1:]
    yield from answer.rest
