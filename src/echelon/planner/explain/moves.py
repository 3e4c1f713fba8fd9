"""The neighbours of a plan that an engineer asks about: one change, and what pays for it.

The number of devices stays. A degree that doubles takes ranks from data parallelism, one that
halves gives them back; microbatches follow from the batch. `pins` say the change to a search that
is free in everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from echelon.planner.choice import Choice
from echelon.planner.choices import MOST_STAGE, NOT_SEARCHED
from echelon.planner.pins import NO_RECOMPUTE
from echelon.planner.request import Request
from echelon.schedule.build import SCHEDULES

SLOWER_ALWAYS = ("naive",)
"""Schedules that nobody asks about: one microbatch at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Name a change: the pins that say it, and the plan with it and nothing else.

    Where no plan has only this change, `exact` is None and `obstacle` says why.
    """

    name: str
    pins: Mapping[str, int | str]
    exact: Choice | None
    obstacle: str = ""


def moves_of(request: Request, choice: Choice) -> Iterator[Move]:
    """Yield the neighbours of a plan, without those that pins of the request exclude."""
    for move in _all_moves(request, choice):
        if all(request.pins.allow(name, value) for name, value in move.pins.items()):
            yield move


def with_degree(request: Request, choice: Choice, axis: str, degree: int) -> Choice | str:
    """Return the plan with another degree of tp, cp or pp, or why data ranks cannot pay for it."""
    mesh = choice.mesh
    now = getattr(mesh, axis)
    if degree > now:
        times = degree // now
        for source in ("dp_shard", "dp_replicate"):
            if getattr(mesh, source) % times == 0:
                changed = {axis: degree, source: getattr(mesh, source) // times}
                return recounted(request, replace(choice, mesh=replace(mesh, **changed)))
        return f"dp {mesh.dp} has no factor {times} to give"
    changed = {axis: degree, "dp_shard": mesh.dp_shard * (now // degree)}
    return recounted(request, replace(choice, mesh=replace(mesh, **changed)))


def recounted(request: Request, choice: Choice) -> Choice:
    """Return the plan with as many microbatches as its batch makes, and nothing without effect."""
    mesh = choice.mesh
    each = request.mathematics.global_sequences // mesh.dp
    changes: dict[str, object] = {"microbatches": max(1, each // choice.microbatch)}
    if mesh.tp == 1:
        changes |= {"sequence_parallel": False, "expert_tp": 1}
    elif choice.expert_tp > 1:
        changes["expert_tp"] = mesh.tp
    if mesh.cp == 1:
        changes |= {"context": "ring", "ulysses": 1}
    elif choice.context == "ulysses":
        changes["ulysses"] = mesh.cp
    if mesh.pp == 1:
        changes |= {"schedule": "1f1b", "virtual": 1}
    return replace(choice, **changes)  # type: ignore[arg-type]


def with_recompute(request: Request, choice: Choice, every: int) -> Choice:
    """Return the plan whose every so-many-th block runs forward again; 0 for none."""
    layers = request.model.layers
    share = ceil(layers / every) / layers if every else 0.0
    return replace(choice, recompute=every, recomputed_share=share)


def with_stage(choice: Choice, stage: int) -> Choice:
    """Return the plan at another ZeRO stage; data ranks are replicas at 0, shards else."""
    mesh = choice.mesh
    if stage == 0 and mesh.ep == 1:
        mesh = replace(mesh, dp_replicate=mesh.dp, dp_shard=1)
    elif choice.zero == 0:
        mesh = replace(mesh, dp_replicate=1, dp_shard=mesh.dp)
    return replace(choice, mesh=mesh, zero=stage)


def _all_moves(request: Request, choice: Choice) -> Iterator[Move]:
    mesh = choice.mesh
    for axis in ("tp", "pp", "cp"):
        yield from _degrees(request, choice, axis)
    if request.model.experts is not None:
        for ep in _doubled(mesh.ep):
            changed = replace(choice, mesh=replace(mesh, ep=ep))
            yield Move(name=f"ep {mesh.ep} -> {ep}", pins={"ep": ep}, exact=changed)
    yield from _shares(choice)
    if mesh.pp > 1:
        yield from _orders(choice)
    for size in _doubled(choice.microbatch):
        yield Move(
            name=f"microbatch {choice.microbatch} -> {size}",
            pins={"microbatch": size},
            exact=recounted(request, replace(choice, microbatch=size)),
        )
    for every, word in ((NO_RECOMPUTE, "none"), (1, "full")):
        if choice.recompute != every:
            exact = with_recompute(request, choice, every)
            yield Move(name=f"recompute {word}", pins={"recompute": every}, exact=exact)
    if mesh.tp > 1:
        on = not choice.sequence_parallel
        yield Move(
            name=f"sequence parallel {'on' if on else 'off'}",
            pins={"sequence_parallel": int(on), "tp": mesh.tp},
            exact=replace(choice, sequence_parallel=on),
        )


def _degrees(request: Request, choice: Choice, axis: str) -> Iterator[Move]:
    now = getattr(choice.mesh, axis)
    for degree in _doubled(now):
        name, pins = f"{axis} {now} -> {degree}", {axis: degree}
        found = with_degree(request, choice, axis, degree)
        if isinstance(found, str):
            yield Move(name=name, pins=pins, exact=None, obstacle=found)
        else:
            yield Move(name=name, pins=pins, exact=found)


def _shares(choice: Choice) -> Iterator[Move]:
    mesh = choice.mesh
    for stage in (choice.zero - 1, choice.zero + 1):
        if 0 <= stage <= MOST_STAGE and mesh.dp * mesh.cp > 1:
            exact = with_stage(choice, stage)
            yield Move(name=f"ZeRO {choice.zero} -> {stage}", pins={"zero": stage}, exact=exact)
    for giver, taker in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
        given, taken = getattr(mesh, giver), getattr(mesh, taker)
        if given % 2 == 0 and choice.zero > 0:
            degrees = {giver: given // 2, taker: taken * 2}
            yield Move(
                name=f"{giver} {given} -> {given // 2}",
                pins=degrees,
                exact=replace(choice, mesh=replace(mesh, **degrees)),
            )


def _orders(choice: Choice) -> Iterator[Move]:
    for name in SCHEDULES:
        if name in (choice.schedule, *NOT_SEARCHED, *SLOWER_ALWAYS):
            continue
        yield _order(choice, name)
    for virtual in _doubled(choice.virtual):
        yield Move(
            name=f"virtual stages {choice.virtual} -> {virtual}",
            pins={"virtual": virtual},
            exact=replace(choice, virtual=virtual),
        )


def _order(choice: Choice, name: str) -> Move:
    """Return the move to another schedule, with as near a number of virtual stages as it takes."""
    pp, builder = choice.mesh.pp, SCHEDULES[name]
    ways = [v for v in range(1, 2 * choice.virtual + 2) if builder.fits_stages(v * pp, pp)]
    if not ways:
        obstacle = f"it takes no number of stages over pp {pp}"
        return Move(name=name, pins={"schedule": name}, exact=None, obstacle=obstacle)
    virtual = min(ways, key=lambda way: abs(way - choice.virtual))
    exact = replace(choice, schedule=name, virtual=virtual)
    return Move(name=name, pins={"schedule": name}, exact=exact)


def _doubled(value: int) -> Iterator[int]:
    """Yield twice the value, and half of it where it is whole."""
    yield 2 * value
    if value % 2 == 0:
        yield value // 2
