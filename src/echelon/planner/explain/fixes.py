"""The cheapest changes with which a plan fits that does not, such as the layout of a run file.

Single changes come first, by the seconds of a step, then those whose seconds are not known (nobody
says how fast hosts are), then more devices; where no single change is enough, pairs, then threes.
A few with one change more follow where they cost less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from echelon.core.plan import Plan
from echelon.planner.choice import Choice
from echelon.planner.estimate import Estimate
from echelon.planner.explain.again import problems_of
from echelon.planner.explain.bands import Banded, difference
from echelon.planner.explain.mending import Mending, mendings, on_more_devices
from echelon.planner.explain.what_if import with_devices
from echelon.planner.pins import NO_RECOMPUTE
from echelon.planner.ranked import Ranked, estimate_choice, settings_of
from echelon.planner.request import Request

MOST_MENDED = 3
MORE = (2, 4, 8)
"""Times the devices of a plan on which it is tried."""
MOST_FURTHER = 3
"""Fixes of one change more that are told where they cost less than the fewest changes."""
WIDEST = 12
"""Plans that do not fit yet of which the leanest are changed once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Hold changes that make a plan fit: what they are as settings, bytes saved, seconds lost.

    `untimed` says that optimizer state goes over a link whose speed nobody knows; `devices` is how
    many the plan takes then.
    """

    changes: tuple[str, ...]
    choice: Choice
    settings: Mapping[str, object]
    estimate: Estimate
    saved_bytes: float
    lost_s: Banded
    lost_share: float
    devices: int
    untimed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    changes: tuple[str, ...]
    choice: Choice
    request: Request
    estimate: Estimate


def fixes_of(request: Request, choice: Choice) -> tuple[Fix, ...]:
    """Return what makes a plan fit, the cheapest first; nothing where it fits."""
    base = estimate_choice(request, choice)
    if base.bytes_held <= request.memory_bytes:
        return ()
    start = _Tried(changes=(), choice=choice, request=request, estimate=base)
    level: Sequence[_Tried] = [start]
    found: list[Fix] = []
    for _ in range(MOST_MENDED):
        tried = _tried(level)
        fitting = [one for one in tried if _fits(one) and _better(one, found)]
        legal = (one for one in sorted(fitting, key=_order) if _legal(one))
        new = [_fix(start, one) for one in islice(legal, MOST_FURTHER if found else None)]
        if found:
            return (*found, *sorted(new, key=_cost))
        found = sorted(new, key=_cost)
        close = [one for one in tried if not _fits(one)]
        level = sorted(close, key=lambda one: one.estimate.bytes_held)[:WIDEST]
    return tuple(found)


def _better(one: _Tried, found: Sequence[Fix]) -> bool:
    """Return whether more changes than those of `found` are worth it: faster, on no more devices.

    Where nothing was found, everything is.
    """
    if not found:
        return True
    first = found[0]
    offloads = one.choice.offload and not first.choice.offload
    shorter = one.estimate.step_s < first.estimate.step_s
    return shorter and not offloads and one.choice.devices <= first.devices


def choice_of(plan: Plan) -> Choice:
    """Return the choices of a plan as a search has them; selective recompute counts as none."""
    layout, layers = plan.layout, plan.model.layers
    again = layout.recompute.every if layout.recompute.policy == "full" else NO_RECOMPUTE
    share = sum(map(layout.recompute.recomputes, range(layers))) / layers
    return Choice(
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
        schedule=layout.pipeline.schedule,
        virtual=layout.pipeline.virtual_stages,
        recompute=again,
        recomputed_share=share if again else 0.0,
    )


def _tried(level: Sequence[_Tried]) -> list[_Tried]:
    """Return every plan that is one change further, each once."""
    found: dict[tuple[Choice, int], _Tried] = {}
    for one in level:
        for mending, request in _mendings(one):
            if set(_topics(one.changes)) & set(_topics((mending.name,))):
                continue
            key = mending.choice, request.cluster.num_devices
            if key not in found:
                found[key] = _Tried(
                    changes=(*one.changes, mending.name),
                    choice=mending.choice,
                    request=request,
                    estimate=estimate_choice(request, mending.choice),
                )
    return [*found.values()]


def _topics(changes: Sequence[str]) -> Iterator[str]:
    """Yield what changes are about: no two of one fix are about the same."""
    for change in changes:
        yield change.split()[0]


def _mendings(one: _Tried) -> Iterator[tuple[Mending, Request]]:
    for mending in mendings(one.request, one.choice):
        if mending.choice != one.choice:
            yield mending, one.request
    for times in MORE:
        count = times * one.choice.devices
        larger = with_devices(one.request, count)
        if larger is not None and larger.cluster.num_devices == count:
            for mending in on_more_devices(larger, one.choice, times):
                yield mending, larger


def _fits(one: _Tried) -> bool:
    return one.estimate.bytes_held <= one.request.memory_bytes


def _legal(one: _Tried) -> bool:
    """Return whether the rules of a run let a plan be, and its batch is shared out evenly."""
    choice, total = one.choice, one.request.mathematics.global_sequences
    if choice.mesh.dp * choice.microbatch * choice.microbatches != total:
        return False
    return not problems_of(one.request, choice)


def _ranked(one: _Tried) -> Ranked:
    return Ranked(choice=one.choice, estimate=one.estimate, simulated=False)


def _fix(start: _Tried, one: _Tried) -> Fix:
    first, second = start.estimate, one.estimate
    before = start.choice.settings(has_experts=True)
    after = settings_of(one.request, _ranked(one))
    lost = difference(first, second)
    return Fix(
        changes=one.changes,
        choice=one.choice,
        settings={key: value for key, value in after.items() if before.get(key) != value},
        estimate=second,
        saved_bytes=first.bytes_held - second.bytes_held,
        lost_s=lost,
        lost_share=lost.value / first.step_s,
        devices=one.choice.devices,
        untimed=one.choice.offload and not start.choice.offload,
    )


def _order(one: _Tried) -> float:
    return one.estimate.step_s


def _cost(fix: Fix) -> tuple[int, int, float]:
    return fix.devices, int(fix.untimed), fix.estimate.step_s
