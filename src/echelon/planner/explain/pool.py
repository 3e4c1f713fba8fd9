"""Plans that may be the best elsewhere: of each pipeline and tensor degree the best few of now.

A question about a large space is searched near the plan only. What is far from it, such as no
pipeline at all, is looked for once, in the world of the answer, and timed there event by event.
In another world their closed forms, times what events made of them here, say which few pipeline
degrees promise most; these are searched there with all else free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from echelon.planner.choice import Choice
from echelon.planner.explain.again import Again
from echelon.planner.explain.moves import recounted
from echelon.planner.explain.what_if import WhatIf
from echelon.planner.lattice import divisors
from echelon.planner.ranked import Ranked, worth
from echelon.planner.request import Request
from echelon.planner.search import Answer, worlds_of
from echelon.planner.simulated import num_actions
from echelon.planner.sweep import Sweep

KEPT = 12
"""Plans of each degree."""
LONGEST = 64
"""Pipeline ranks up to which plans are looked for; more are near the plan, or no good."""
ACTIONS = 150_000
"""Actions that are timed in the world of the answer."""
FAR = 0.3
"""By how much slower a plan is here, by closed forms, that is not looked at elsewhere."""
AGAIN, CLOSE = 3, 0.04
"""Pipeline degrees that are searched for one question, and how close to the first they promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """Hold a plan, and its seconds by events over those by closed forms in the answer's world."""

    choice: Choice
    ratio: float


def pool_of(answer: Answer, now: Again) -> tuple[Pooled, ...]:
    """Return plans of every kind; what no event timed is like what was timed of its degree."""
    assert answer.best is not None
    found = {choice: None for degree in _degrees(answer) for choice in _best_of(answer, *degree)}
    finalists = [one.choice for one in (*answer.ranked, *answer.rest)]
    every = {choice: now.closed(choice) for choice in (*found, *finalists)}
    least = min(worth(now.request, one.estimate) for one in every.values())
    near = [c for c, one in every.items() if worth(now.request, one.estimate) < least * (1 + FAR)]
    return tuple(_pooled(now, _in_turn(now, near)))


def elsewhere(
    pool: Sequence[Pooled], answer: Answer, again: Again, question: WhatIf, bound: float
) -> Iterator[Ranked]:
    """Yield the best plans under a question of the few pipeline degrees that promise most.

    Those that promise no less than `bound`, what the best plan near the old one is worth, are not
    looked at.
    """
    whole = Again(answer, question.request)
    whole.near = False
    promised: dict[int, tuple[float, Choice]] = {}
    for one in pool:
        choice = _moved(answer.request, question.request, one.choice)
        if choice is not None and again.fits(choice):
            cost = one.ratio * worth(again.request, again.closed(choice).estimate)
            before = promised.get(choice.mesh.pp)
            if before is None or cost < before[0]:
                promised[choice.mesh.pp] = cost, choice
    order = sorted(promised, key=lambda degree: promised[degree][0])
    for degree in order[:AGAIN]:
        cost, choice = promised[degree]
        if cost > (1 + CLOSE) * promised[order[0]][0] or cost >= bound:
            return
        among = () if whole.problems(choice) else (choice,)
        found = whole.search(question.request.pins.having("pp", degree), among=among)
        if found.best is not None:
            yield found.best


def _degrees(answer: Answer) -> Iterator[tuple[str, int]]:
    """Yield the degrees of which each has its best plans."""
    request = answer.request
    longest = min(LONGEST, request.model.layers)
    for name, most in (("pp", longest), ("tp", request.cluster.devices_per_node)):
        for degree in divisors(request.cluster.num_devices):
            if degree <= most and request.pins.allow(name, degree):
                yield name, degree


def _best_of(answer: Answer, name: str, degree: int) -> list[Choice]:
    pins = answer.request.pins.having(name, degree)
    request = replace(answer.request, pins=pins)
    sweep = Sweep(request, offload=answer.offload, keep=KEPT)
    for world in worlds_of(request):
        sweep.walk(world)
    return [one.choice() for one in sweep.best.ranked()]


def _in_turn(now: Again, choices: Sequence[Choice]) -> list[Choice]:
    """Return plans by closed forms, but the best of each pipeline degree before any second one."""
    order = sorted(choices, key=lambda one: worth(now.request, now.closed(one).estimate))
    before: dict[int, int] = {}
    places: dict[Choice, int] = {}
    for choice in order:
        places[choice] = before.get(choice.mesh.pp, 0)
        before[choice.mesh.pp] = places[choice] + 1
    return sorted(order, key=places.__getitem__)


def _pooled(now: Again, choices: Sequence[Choice]) -> Iterator[Pooled]:
    left = ACTIONS
    alike: dict[int, float] = {1: 1.0}
    for choice in choices:
        degree = choice.mesh.pp
        actions = 0 if degree == 1 else num_actions(choice)
        ratio = alike.get(degree)
        if actions and actions <= left:
            left -= actions
            one = now.timed(choice)
            if one.simulated:
                ratio = one.estimate.step_s / now.closed(choice).estimate.step_s
                alike.setdefault(degree, ratio)
        if ratio is not None:
            yield Pooled(choice=choice, ratio=ratio)


def _moved(here: Request, there: Request, choice: Choice) -> Choice | None:
    """Return a plan with the batch and the devices of another world, None where it is uneven."""
    times = there.cluster.num_devices // here.cluster.num_devices
    total = there.mathematics.global_sequences
    if times == 1 and total == here.mathematics.global_sequences:
        return choice
    mesh = replace(choice.mesh, dp_shard=times * choice.mesh.dp_shard)
    moved = recounted(there, replace(choice, mesh=mesh))
    even = total == moved.mesh.dp * moved.microbatch * moved.microbatches
    return moved if even else None
