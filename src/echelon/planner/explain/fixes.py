# SPDX-License-Identifier: Apache-2.0
"""The cheapest changes with which a plan fits that does not, such as the layout of a run file.

Single changes come first, by the seconds of a step, then those whose seconds are not known (nobody
says how fast hosts are), then more devices, as few as do; where no single change is enough, pairs,
then threes. A few with one change more follow where they cost less. What may make a plan hold less
is what an engineer tries. Where none of it helps on the devices that there are, the smallest
cluster on which the run has any plan is told (`planner/search/search.py`).

A search in which nothing fits has other changes (`no_plan.py`), which are priced in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeAlias

from echelon.core.plan import Plan
from echelon.planner.explain.neighbours import (
    with_degree,
    with_recompute,
    with_recounted_microbatches,
    with_stage,
)
from echelon.planner.explain.repeat_search import candidate_problems
from echelon.planner.explain.sensitivity import with_devices
from echelon.planner.predict.bands import BandedValue, step_difference_band
from echelon.planner.predict.estimate import Estimate
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.options import MOST_STAGE, operator_options, rounding_of_plan
from echelon.planner.search.pins import MOST_RECOMPUTE_INTERVAL, NO_RECOMPUTE
from echelon.planner.search.ranked import RankedPlan, estimate_candidate, settings_from_ranked
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import smallest_that_fits
from echelon.schedule.build import PLAIN_SCHEDULE

_MemorySaving: TypeAlias = tuple[str, CandidatePlan]
"""The name of a change, and the plan after it."""


def memory_savings(request: SearchRequest, choice: CandidatePlan) -> Iterator[_MemorySaving]:
    """Yield every change of a plan that may make it hold less; some may not be legal."""
    mesh = choice.mesh
    for option in operator_options(request):
        if not choice.recompute and set(option.operators) != set(choice.operators):
            name = f"recompute {' and '.join(option.operators)}"
            yield name, replace(choice, operators=option.operators)
    for every in range(MOST_RECOMPUTE_INTERVAL, 0, -1):
        if not choice.recompute or every < choice.recompute:
            name = "recompute every block" if every == 1 else f"recompute every {every} blocks"
            yield name, with_recompute(request, choice, every)
    if mesh.dp * mesh.cp > 1:
        for stage in range(choice.zero + 1, MOST_STAGE + 1):
            yield f"ZeRO {choice.zero} -> {stage}", with_stage(choice, stage)
        if mesh.dp_replicate > 1 and choice.zero > 0:
            whole = replace(mesh, dp_replicate=1, dp_shard=mesh.dp)
            yield f"shards over all {mesh.dp} data ranks", replace(choice, mesh=whole)
    size = choice.microbatch
    while size % 2 == 0:
        size //= 2
        smaller = with_recounted_microbatches(request, replace(choice, microbatch=size))
        yield f"microbatch {choice.microbatch} -> {size}", smaller
    if mesh.tp > 1 and not choice.sequence_parallel:
        yield "sequence parallel", replace(choice, sequence_parallel=True)
    if mesh.pp > 1 and choice.schedule != PLAIN_SCHEDULE:
        plain = replace(choice, schedule=PLAIN_SCHEDULE, virtual=1)
        yield f"{choice.schedule} -> {PLAIN_SCHEDULE}", plain
    yield from _degrees(request, choice)
    if not choice.offload:
        home = replace(choice, offload=True)
        yield "optimizer state to the host", home if choice.zero else with_stage(home, 1)


def _on_more_devices(
    request: SearchRequest, choice: CandidatePlan, times: int
) -> Iterator[_MemorySaving]:
    """Yield the plan over so many times the devices, each axis in turn so much longer."""
    mesh = choice.mesh
    for axis, name in (("dp_shard", "dp"), ("tp", "tp"), ("pp", "pp"), ("cp", "cp")):
        more = replace(mesh, **{axis: times * getattr(mesh, axis)})
        longer = with_recounted_microbatches(request, replace(choice, mesh=more))
        text = f"devices x{times} as {name} {getattr(mesh, name)} -> {times * getattr(mesh, name)}"
        yield text, _with_streams(longer, mesh.tp)


def _degrees(request: SearchRequest, choice: CandidatePlan) -> Iterator[_MemorySaving]:
    for axis in ("tp", "pp", "cp"):
        now = getattr(choice.mesh, axis)
        for times in (2, 4, 8):
            found = with_degree(request, choice, axis, times * now)
            if isinstance(found, CandidatePlan):
                yield f"{axis} {now} -> {times * now}", _with_streams(found, choice.mesh.tp)


def _with_streams(choice: CandidatePlan, tp: int) -> CandidatePlan:
    """Return a plan that got tensor ranks with sequence parallelism, as a run has by itself."""
    begins = tp == 1 and choice.mesh.tp > 1
    return replace(choice, sequence_parallel=choice.sequence_parallel or begins)


_MOST_MENDED = 3  # fixes
MORE = range(2, 9)
"""Times the devices of a plan on which it is tried."""
_MOST_FURTHER = 3
"""Fixes of one change more that are told where they cost less than the fewest changes."""
WIDEST = 12
"""Plans that do not fit yet of which the leanest are changed once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFix:
    """Hold changes that make a plan fit, and what they cost."""

    changes: tuple[str, ...]
    """What changes, in words."""
    choice: CandidatePlan
    """The plan with them, as choices."""
    settings: Mapping[str, object]
    """The changes as settings."""
    flags: str
    """Flags to type for the changes."""
    estimate: Estimate
    """What that plan takes."""
    saved_bytes: float
    """Bytes that it holds less."""
    lost_s: BandedValue
    """Seconds that a step takes longer."""
    time_ratio: float
    """Seconds of a token with the changes, over the same of the plan that is too large."""
    devices: int
    """Devices that the plan then takes."""
    untimed: bool
    """Whether optimizer state goes over a link whose speed nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedChanges:
    """Hold changes that were tried, the plan with them, and what it takes under a request.

    `flags` are the flags to type for the changes; empty if settings of the plan are typed.
    """

    changes: tuple[str, ...]
    choice: CandidatePlan
    request: SearchRequest
    estimate: Estimate
    flags: str = ""


def tried_changes(
    changes: tuple[str, ...], request: SearchRequest, choice: CandidatePlan, flags: str = ""
) -> TriedChanges:
    """Return changes with the plan after them, and what it takes by closed forms."""
    estimate = estimate_candidate(request, choice)
    return TriedChanges(
        changes=changes, choice=choice, request=request, estimate=estimate, flags=flags
    )


def find_fixes(request: SearchRequest, choice: CandidatePlan) -> tuple[PlanFix, ...]:
    """Return what makes a plan fit, the cheapest first; nothing where it fits."""
    start = tried_changes((), request, choice)
    if _fits(start):
        return ()
    base, before = start.estimate, choice.settings(has_experts=True)
    price = partial(price_fix, base=base, offloaded=choice.offload, before=before)
    found = _fewest_changes(start, price)
    if not found or found[0].devices > choice.devices:
        # Another split of the model may do on fewer devices than this one that goes on growing.
        anew = [price(one) for one in _split_anew(request)]
        found = sorted((*anew, *found[:1]), key=fix_cost) + found[1:]
    fewest = min((fix.devices for fix in found if fix.devices > choice.devices), default=0)
    return tuple(fix for fix in found if fix.devices <= choice.devices or fix.devices == fewest)


def _fewest_changes(start: TriedChanges, price: Callable[[TriedChanges], PlanFix]) -> list[PlanFix]:
    """Return the fewest changes with which a plan fits, and a few with one more that cost less."""
    level: Sequence[TriedChanges] = [start]
    found: list[PlanFix] = []
    for _ in range(_MOST_MENDED):
        tried = _tried(level)
        fitting = [one for one in tried if _fits(one) and _better(one, found)]
        legal = (one for one in sorted(fitting, key=lambda one: one.estimate.step_s) if _legal(one))
        new = [price(one) for one in islice(legal, _MOST_FURTHER if found else None)]
        if found:
            return [*found, *sorted(new, key=fix_cost)]
        found = sorted(new, key=fix_cost)
        close = [one for one in tried if not _fits(one)]
        level = sorted(close, key=lambda one: one.estimate.bytes_held)[:WIDEST]
    return found


def _split_anew(request: SearchRequest) -> Iterator[TriedChanges]:
    """Yield the plan of the smallest cluster of the same devices that has one."""
    found = smallest_that_fits(request)
    if found is not None:
        count, host = found.num_devices, ", optimizer state on the host" * found.offload
        changes = (f"another split on {count:,} device{'s' * (count > 1)}{host}",)
        yield tried_changes(changes, found.request, found.plan.candidate)


def _better(one: TriedChanges, found: Sequence[PlanFix]) -> bool:
    """Return whether more changes than those of `found` are worth it: faster, on no more devices.

    Where nothing was found, everything is.
    """
    if not found:
        return True
    first = found[0]
    offloads = one.choice.offload and not first.choice.offload
    shorter = one.estimate.step_s < first.estimate.step_s
    return shorter and not offloads and one.choice.devices <= first.devices


def candidate_from_plan(plan: Plan) -> CandidatePlan:
    """Return the choices of a plan as a search has them."""
    layout, layers = plan.layout, plan.model.layers
    again = layout.recompute.every if layout.recompute.policy == "full" else NO_RECOMPUTE
    share = sum(map(layout.recompute.recomputes, range(layers))) / layers
    return CandidatePlan(
        mesh=layout.mesh,
        sequence_parallel=layout.sequence_parallel,
        context=layout.context.kind,
        ulysses=layout.context.ulysses_degree,
        expert_tp=layout.experts.expert_tp,
        microbatch=layout.microbatch_sequences,
        microbatches=plan.num_microbatches,
        zero=layout.zero.stage,
        reshard=layout.zero.reshard_after_forward,
        offload=layout.zero.optimizer_offload != "none",
        secondary=layout.zero.secondary,
        rounding=rounding_of_plan(plan),
        schedule=layout.pipeline.schedule,
        virtual=layout.pipeline.virtual_stages,
        recompute=again,
        recomputed_share=share if again else 0.0,
        operators=layout.recompute.operators,
    )


def _tried(level: Sequence[TriedChanges]) -> list[TriedChanges]:
    """Return every plan that is one change further, each once."""
    found: dict[tuple[CandidatePlan, int], TriedChanges] = {}
    for one in level:
        for (name, choice), request in _memory_savings(one):
            # No two changes of one fix are about the same.
            if name.split()[0] in {change.split()[0] for change in one.changes}:
                continue
            key = choice, request.cluster.num_devices
            if key not in found:
                found[key] = tried_changes((*one.changes, name), request, choice)
    return [*found.values()]


def _memory_savings(one: TriedChanges) -> Iterator[tuple[_MemorySaving, SearchRequest]]:
    for mending in memory_savings(one.request, one.choice):
        if mending[1] != one.choice:
            yield mending, one.request
    for times in MORE:
        count = times * one.choice.devices
        larger = with_devices(one.request, count)
        if larger is not None and larger.cluster.num_devices == count:
            for mending in _on_more_devices(larger, one.choice, times):
                yield mending, larger


def _fits(one: TriedChanges) -> bool:
    return one.estimate.bytes_held <= one.request.memory_bytes


def _legal(one: TriedChanges) -> bool:
    """Return whether the rules of a run let a plan be, and its batch is shared out evenly."""
    choice, total = one.choice, one.request.mathematics.global_sequences
    if choice.mesh.dp * choice.microbatch * choice.microbatches != total:
        return False
    return not candidate_problems(one.request, choice)


def price_fix(
    one: TriedChanges,
    *,
    base: Estimate,
    offloaded: bool,
    before: Mapping[str, object] | None = None,
) -> PlanFix:
    """Return the bytes that changes save and the time that they cost, against a plan too large.

    Their settings are those that `before` does not have; `offloaded` says whether optimizer state
    was with the host before.
    """
    ranked = RankedPlan(candidate=one.choice, estimate=one.estimate, simulated=False)
    chosen, known = settings_from_ranked(one.request, ranked), before or {}
    settings = {key: value for key, value in chosen.items() if known.get(key) != value}
    if one.choice.devices != base.devices:
        settings["cluster.preset"] = one.request.cluster.name
    typed = " ".join(f"--set {key}={_typed(value)}" for key, value in settings.items())
    seconds = one.estimate.step_s / one.estimate.tokens
    return PlanFix(
        changes=one.changes,
        choice=one.choice,
        settings=settings,
        flags=one.flags or typed,
        estimate=one.estimate,
        saved_bytes=base.bytes_held - one.estimate.bytes_held,
        lost_s=step_difference_band(base, one.estimate),
        time_ratio=seconds / (base.step_s / base.tokens),
        devices=one.choice.devices,
        untimed=one.choice.offload and not offloaded,
    )


def _typed(value: object) -> str:
    """Return a value in the form that `--set` takes."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def fix_cost(fix: PlanFix) -> tuple[int, int, float]:
    """Return by what fixes are sorted: devices, then seconds, those that nobody knows last."""
    return fix.devices, int(fix.untimed), fix.estimate.step_s
