# SPDX-License-Identifier: Apache-2.0
"""Why not the neighbours of the best plan: the rule, the bytes or the seconds against each.

Each neighbour is looked at twice: with one change and nothing else, and as the best of all plans
that have the change. A plan with one change may lose for what a second change would mend; that the
best of all loses too is the answer.

A neighbour is one change that an engineer asks about, and what pays for it. The number of devices
stays: a degree that doubles takes ranks from data parallelism, one that halves gives them back;
microbatches follow from the batch. `pins` say the change to a search that is free in everything
else. Two plans of searches are told apart choice by choice, in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, TypeAlias

from echelon.core.choices.context_kinds import CONTEXT_KINDS, PLAIN_CONTEXT_KIND
from echelon.core.errors import Problem
from echelon.core.rulebook.planner import NO_PLAN_IS_LEGAL, PLAN_FITS_MEMORY
from echelon.planner.explain.repeat_search import RepeatSearch
from echelon.planner.predict.bands import (
    BandedTerms,
    BandedValue,
    byte_term_differences,
    step_difference_band,
    step_term_differences,
)
from echelon.planner.predict.estimate import peak_bytes_by_place
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.options import MOST_STAGE, operator_options
from echelon.planner.search.pins import NO_RECOMPUTE, SELECTIVE
from echelon.planner.search.ranked import RankedPlan, has_slices_in_nodes
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult
from echelon.schedule.build import PLAIN_SCHEDULE, SCHEDULES

NeighbourVerdict = Literal["refused", "too large", "slower", "as fast", "faster"]
ALIKE = 1e-4
"""A share of a step that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourOutcome:
    """Say what speaks against a plan, or for it."""

    verdict: NeighbourVerdict
    """What becomes of it."""
    plan: RankedPlan | None = None
    """The plan; None where rules refuse all."""
    problems: tuple[Problem, ...] = ()
    """Those of the rules that refuse it."""
    over_bytes: float = 0.0
    """Where it is too large, bytes by which it is."""
    grown: tuple[tuple[str, float], ...] = ()
    """Where it is too large, the terms that hold more than in the best plan, and bytes."""
    rank: str = ""
    """Where it is too large, the ranks that hold most, in words."""
    slower_s: BandedValue | None = None
    """Where it fits, seconds that a step takes longer."""
    share: float = 0.0
    """The same over a step of the best plan."""
    terms: BandedTerms = field(default_factory=dict[str, BandedValue])
    """The terms that make it slower, the largest first."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the ids of the rules that refuse it."""
        return tuple(problem.rule for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Hold a change, what it is by itself (None: no plan has it alone), and at its best."""

    change: str
    pins: Mapping[str, int | str]
    by_itself: NeighbourOutcome | None
    at_best: NeighbourOutcome
    obstacle: str = ""


def explain_neighbours(answer: SearchResult) -> tuple[Neighbour, ...]:
    """Return the neighbours of the best plan, those that come nearest to it first."""
    request = request_on_same_devices(answer)
    again = RepeatSearch(answer, request)
    found = [
        _neighbour(again, answer.first, move)
        for move in neighbouring_changes(request, answer.first.candidate)
    ]
    return tuple(sorted(found, key=_nearness))


def request_on_same_devices(answer: SearchResult) -> SearchRequest:
    """Return the request on as many devices as the best plan takes, which are asked to be fast."""
    pins = answer.request.pins.having("devices", answer.first.candidate.devices)
    return replace(answer.request, pins=pins, objective="time")


def _compare_with_best(
    again: RepeatSearch, best: RankedPlan, choice: CandidatePlan
) -> NeighbourOutcome:
    """Return what speaks against one plan beside the best."""
    if problems := again.problems(choice):
        return NeighbourOutcome(verdict="refused", problems=problems)
    near = again.fits(choice) and again.close(best, choice)
    timed = again.time_by_events(choice) if near else again.estimate_closed_form(choice)
    return _compare_legal_with_best(again, best, timed)


def _compare_legal_with_best(
    again: RepeatSearch, best: RankedPlan, other: RankedPlan
) -> NeighbourOutcome:
    """Return what the bytes, or else the seconds, of a legal plan say against it."""
    over = other.estimate.bytes_held - again.request.memory_bytes
    # Of both plans the bytes of closed forms: lists are there of plans of an answer only.
    closed = again.estimate_closed_form(best.candidate).estimate
    grown = byte_term_differences(closed, other.estimate)
    more = tuple((name, count) for name, count in grown if count > 0)
    if over > 0:
        rank = fullest_rank(other)
        return NeighbourOutcome(
            verdict="too large", plan=other, over_bytes=over, grown=more, rank=rank
        )
    first, second = again.timed_the_same_way(best, other)
    slower = step_difference_band(first.estimate, second.estimate)
    share = slower.value / first.estimate.step_s
    verdict: NeighbourVerdict = "slower" if share > 0 else "faster"
    return NeighbourOutcome(
        verdict="as fast" if abs(share) < ALIKE else verdict,
        plan=second,
        grown=more,
        slower_s=slower,
        share=share,
        terms=step_term_differences(first.estimate, second.estimate),
    )


def fullest_rank(one: RankedPlan) -> str:
    """Return which ranks hold most: those of the first stage, or of the last, with the logits."""
    mesh = one.candidate.mesh
    if mesh.pp == 1:
        return "every rank" if mesh.world_size > 1 else "the rank"
    each = mesh.world_size // mesh.pp
    # Bytes of lists have no term for the logits: of these it is the place that holds most.
    if one.plan is not None:
        places = [sum(terms.values()) for terms in peak_bytes_by_place(one.plan)]
        place = places.index(max(places))
    else:
        place = mesh.pp - 1 if one.estimate.bytes["logits"] > 0 else 0
    return f"pp rank {place} (ranks {place * each} to {(place + 1) * each - 1})"


def _neighbour(again: RepeatSearch, best: RankedPlan, move: PlanChange) -> Neighbour:
    request = again.request
    exact, among = None, ()
    if move.candidate is not None:
        exact = _compare_with_best(again, best, move.candidate)
        among = (move.candidate,) if exact.slower_s is not None else ()
    pins = request.pins
    for name, value in move.pins.items():
        pins = pins.having(name, value)
    found = again.search(pins, among=among)
    if found.best is not None:
        free = _compare_legal_with_best(again, best, found.best)
    elif found.seen:
        free = _leanest(request, exact, found.least_bytes)
    else:
        problems = tuple(_refusals(request, move, exact, found.refused))
        free = NeighbourOutcome(verdict="refused", problems=problems)
    return Neighbour(
        change=move.name, pins=move.pins, by_itself=exact, at_best=free, obstacle=move.obstacle
    )


def _leanest(
    request: SearchRequest, exact: NeighbourOutcome | None, least_bytes: float
) -> NeighbourOutcome:
    """Return by how much everything with a change is too large; or the change by itself is."""
    over = least_bytes - request.memory_bytes
    if over > 0 or exact is None or exact.verdict != "too large":
        return NeighbourOutcome(verdict="too large", over_bytes=max(0.0, over))
    return exact


def _refusals(
    request: SearchRequest,
    move: PlanChange,
    exact: NeighbourOutcome | None,
    refused: Mapping[str, int],
) -> Iterator[Problem]:
    """Yield why no plan has a change: what is wrong with it alone, or the rules that were met."""
    if exact is not None and exact.problems:
        yield from exact.problems
        return
    said = ", ".join(f"{k}={v}" for k, v in move.pins.items())
    others = ((rule, count) for rule, count in refused.items() if rule != PLAN_FITS_MEMORY.id)
    because = (
        ", ".join(f"{rule} ({count})" for rule, count in others)
        or move.obstacle
        or "the mesh has no such place"
    )
    yield NO_PLAN_IS_LEGAL.problem(
        f"no plan over {request.pins.values['devices'][0]} devices has {said}: {because}"
    )


def _nearness(one: Neighbour) -> tuple[int, float]:
    places: Mapping[NeighbourVerdict, int] = {"too large": 1, "refused": 2}
    value = one.at_best.share if one.at_best.slower_s is not None else one.at_best.over_bytes
    return places.get(one.at_best.verdict, 0), value


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
