# SPDX-License-Identifier: Apache-2.0
"""The neighbours of a plan that an engineer asks about: one change, and what pays for it.

Two plans of searches are told apart choice by choice, in words.

The number of devices stays. A degree that doubles takes ranks from data parallelism, one that
halves gives them back; microbatches follow from the batch. `pins` say the change to a search that
is free in everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeAlias

from echelon.core.choices.context_kinds import CONTEXT_KINDS, PLAIN_CONTEXT_KIND
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.options import MOST_STAGE
from echelon.planner.search.pins import NO_RECOMPUTE, SELECTIVE
from echelon.planner.search.ranked import has_slices_in_nodes
from echelon.planner.search.recompute_options import operator_options
from echelon.planner.search.request import SearchRequest
from echelon.schedule.build import PLAIN_SCHEDULE, SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """Name a change: the pins that say it, and the plan with it and nothing else.

    Where no plan has only this change, `candidate` is None and `obstacle` says why.
    """

    name: str
    pins: Mapping[str, int | str]
    candidate: CandidatePlan | None
    obstacle: str = ""


def neighbouring_changes(request: SearchRequest, choice: CandidatePlan) -> Iterator[PlanChange]:
    """Yield the neighbours of a plan, without those that pins of the request exclude."""
    for move in _all_changes(request, choice):
        if all(request.pins.allows(name, value) for name, value in move.pins.items()):
            yield move


def with_degree(
    request: SearchRequest, choice: CandidatePlan, axis: str, degree: int
) -> CandidatePlan | str:
    """Return the plan with another degree of tp, cp or pp, or why data ranks cannot pay for it."""
    mesh, now = choice.mesh, getattr(choice.mesh, axis)
    times = max(1, degree // now)
    payers = [name for name in ("dp_shard", "dp_replicate") if getattr(mesh, name) % times == 0]
    if not payers:
        return f"dp {mesh.dp} has no factor {times} to give"
    paid = getattr(mesh, payers[0]) * max(1, now // degree) // times
    changed = replace(mesh, **{axis: degree, payers[0]: paid})
    return with_recounted_microbatches(request, replace(choice, mesh=changed))


def with_recounted_microbatches(request: SearchRequest, choice: CandidatePlan) -> CandidatePlan:
    """Return the plan with as many microbatches as its batch makes, and nothing without effect."""
    mesh = choice.mesh
    each = request.mathematics.global_sequences // mesh.dp
    changes: dict[str, object] = {"microbatches": max(1, each // choice.microbatch)}
    if mesh.tp == 1:
        changes |= {"sequence_parallel": False, "expert_tp": 1}
    elif choice.expert_tp > 1:
        changes["expert_tp"] = mesh.tp
    if mesh.cp == 1:
        changes |= {"context": PLAIN_CONTEXT_KIND, "ulysses": 1}
    elif CONTEXT_KINDS[choice.context].exchange == "all":
        changes["ulysses"] = mesh.cp
    if mesh.pp == 1:
        changes |= {"schedule": PLAIN_SCHEDULE, "virtual": 1}
    return replace(choice, **changes)  # type: ignore[arg-type]


def with_recompute(request: SearchRequest, choice: CandidatePlan, every: int) -> CandidatePlan:
    """Return the plan whose every so-many-th block runs forward again; 0 for none."""
    layers = request.model.layers
    share = ceil(layers / every) / layers if every else 0.0
    return replace(choice, recompute=every, recomputed_share=share, operators=())


def with_stage(choice: CandidatePlan, stage: int) -> CandidatePlan:
    """Return the plan at another ZeRO stage; data ranks are replicas at 0, shards else."""
    mesh = choice.mesh
    if stage == 0 and mesh.ep == 1:
        mesh = replace(mesh, dp_replicate=mesh.dp, dp_shard=1)
    elif choice.zero == 0:
        mesh = replace(mesh, dp_replicate=1, dp_shard=mesh.dp)
    return replace(choice, mesh=mesh, zero=stage)


def _all_changes(request: SearchRequest, choice: CandidatePlan) -> Iterator[PlanChange]:
    mesh = choice.mesh
    for axis in ("tp", "pp", "cp"):
        yield from _degrees(request, choice, axis)
    if request.model.experts is not None:
        for ep in _doubled(mesh.ep):
            changed = replace(choice, mesh=replace(mesh, ep=ep))
            yield PlanChange(name=f"ep {mesh.ep} -> {ep}", pins={"ep": ep}, candidate=changed)
    yield from _zero_changes(choice)
    yield from _slices_in_nodes(request, choice)
    if mesh.pp > 1:
        yield from _schedule_changes(choice)
    for size in _doubled(choice.microbatch):
        exact = with_recounted_microbatches(request, replace(choice, microbatch=size))
        name = f"microbatch {choice.microbatch} -> {size}"
        yield PlanChange(name=name, pins={"microbatch": size}, candidate=exact)
    for every, word in ((NO_RECOMPUTE, "none"), (1, "full")):
        if choice.recompute != every or choice.operators:
            exact = with_recompute(request, choice, every)
            yield PlanChange(name=f"recompute {word}", pins={"recompute": every}, candidate=exact)
    for option in operator_options(request)[:1]:
        if choice.recompute or choice.operators != option.operators:
            exact = replace(with_recompute(request, choice, 0), operators=option.operators)
            name = f"recompute {' and '.join(option.operators)}"
            yield PlanChange(name=name, pins={"recompute": SELECTIVE}, candidate=exact)
    if mesh.tp > 1:
        on = not choice.sequence_parallel
        yield PlanChange(
            name=f"sequence parallel {'on' if on else 'off'}",
            pins={"sequence_parallel": int(on), "tp": mesh.tp},
            candidate=replace(choice, sequence_parallel=on),
        )


def _degrees(request: SearchRequest, choice: CandidatePlan, axis: str) -> Iterator[PlanChange]:
    now = getattr(choice.mesh, axis)
    for degree in _doubled(now):
        name, pins = f"{axis} {now} -> {degree}", {axis: degree}
        found = with_degree(request, choice, axis, degree)
        obstacle, exact = (found, None) if isinstance(found, str) else ("", found)
        yield PlanChange(name=name, pins=pins, candidate=exact, obstacle=obstacle)


def _zero_changes(choice: CandidatePlan) -> Iterator[PlanChange]:
    mesh = choice.mesh
    for stage in (choice.zero - 1, choice.zero + 1):
        if 0 <= stage <= MOST_STAGE and mesh.dp * mesh.cp > 1:
            exact, name = with_stage(choice, stage), f"ZeRO {choice.zero} -> {stage}"
            yield PlanChange(name=name, pins={"zero": stage}, candidate=exact)
    for giver, taker in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
        given, taken = getattr(mesh, giver), getattr(mesh, taker)
        if given % 2 == 0 and choice.zero > 0:
            degrees = {giver: given // 2, taker: taken * 2}
            exact = replace(choice, mesh=replace(mesh, **degrees))
            name = f"{giver} {given} -> {given // 2}"
            yield PlanChange(name=name, pins=degrees, candidate=exact)


def _slices_in_nodes(request: SearchRequest, choice: CandidatePlan) -> Iterator[PlanChange]:
    """Yield the plan whose nodes keep slices, or keep none, where they can."""
    other = replace(choice, secondary=not choice.keeps_slices)
    if has_slices_in_nodes(request, replace(choice, secondary=True)):
        name = f"secondary slices {'on' if other.secondary else 'off'}"
        yield PlanChange(name=name, pins={"secondary": int(other.secondary)}, candidate=other)


def _schedule_changes(choice: CandidatePlan) -> Iterator[PlanChange]:
    for name, builder in SCHEDULES.items():
        if name != choice.schedule and builder.is_searched and builder.is_suggested:
            yield _change_to_schedule(choice, name)
    for virtual in _doubled(choice.virtual):
        exact, name = (
            replace(choice, virtual=virtual),
            f"virtual stages {choice.virtual} -> {virtual}",
        )
        yield PlanChange(name=name, pins={"virtual": virtual}, candidate=exact)


def _change_to_schedule(choice: CandidatePlan, name: str) -> PlanChange:
    """Return the move to another schedule, with as near a number of virtual stages as it takes."""
    pp, builder = choice.mesh.pp, SCHEDULES[name]
    ways = [v for v in range(1, 2 * choice.virtual + 2) if builder.fits_stages(v * pp, pp)]
    near = min(ways, key=lambda way: abs(way - choice.virtual), default=0)
    exact = replace(choice, schedule=name, virtual=near) if ways else None
    obstacle = "" if ways else f"it takes no number of stages over pp {pp}"
    return PlanChange(name=name, pins={"schedule": name}, candidate=exact, obstacle=obstacle)


def _doubled(value: int) -> Iterator[int]:
    """Yield twice the value, and half of it where it is whole."""
    yield 2 * value
    if value % 2 == 0:
        yield value // 2


CandidateDifference: TypeAlias = tuple[str, str, str]
"""A choice that two plans have otherwise: its name, in the old plan, in the new one."""


def candidate_differences(
    old: CandidatePlan, new: CandidatePlan
) -> tuple[CandidateDifference, ...]:
    """Return what one plan has otherwise than another one."""
    before, after = _settings_as_words(old), _settings_as_words(new)
    return tuple((name, old, after[name]) for name, old in before.items() if old != after[name])


def _settings_as_words(choice: CandidatePlan) -> dict[str, str]:
    """Return the choices of a plan as words; those that follow from others are left out."""
    mesh = choice.mesh
    again = {0: "none", 1: "full"}.get(choice.recompute, f"every {choice.recompute}")
    if choice.operators:
        again = " and ".join([*([] if again == "none" else [again]), *choice.operators])
    words = {
        "devices": choice.devices,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "dp": mesh.dp_text,
        "ep": mesh.ep,
        "ZeRO": choice.zero,
        "microbatch": choice.microbatch,
        "schedule": choice.schedule if mesh.pp > 1 else "none",
        "virtual stages": choice.virtual,
        "recompute": again,
        "sequence parallel": "on" if choice.sequence_parallel else "off",
        "context": choice.context if mesh.cp > 1 else "none",
        "expert tp": choice.expert_tp,
        "offload": "host" if choice.offload else "none",
        "secondary slices": "in nodes" if choice.keeps_slices else "none",
    }
    return {name: str(value) for name, value in words.items()}
