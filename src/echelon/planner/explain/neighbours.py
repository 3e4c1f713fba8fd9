"""Why not the neighbours of the best plan: the rule, the bytes or the seconds against each.

Each neighbour is looked at twice: with one change and nothing else, and as the best of all plans
that have the change. A plan with one change may lose for what a second change would mend; that the
best of all loses too is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from echelon.core.errors import Problem
from echelon.core.rulebook.planner import NO_PLAN_IS_LEGAL, PLAN_FITS_MEMORY
from echelon.planner.choice import Choice
from echelon.planner.explain.again import Again
from echelon.planner.explain.bands import (
    Banded,
    Term,
    byte_differences,
    difference,
    term_differences,
)
from echelon.planner.explain.moves import Move, moves_of
from echelon.planner.ranked import Ranked
from echelon.planner.request import Request
from echelon.planner.search import Answer

Verdict = Literal["refused", "too large", "slower", "as fast", "faster"]
ALIKE = 1e-4
"""A share of a step that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Say what speaks against a plan, or for it.

    `problems` are those of the rules that refuse it; where it is too large, `over_bytes` is by how
    much, `grown` which terms hold more than in the best plan; else `slower_s` is how much longer a
    step takes, `terms` by which terms, the largest first. `plan` is None where rules refuse all.
    """

    verdict: Verdict
    plan: Ranked | None = None
    problems: tuple[Problem, ...] = ()
    over_bytes: float = 0.0
    grown: tuple[tuple[str, float], ...] = ()
    rank: str = ""
    slower_s: Banded | None = None
    share: float = 0.0
    terms: tuple[Term, ...] = ()

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the ids of the rules that refuse it."""
        return tuple(problem.rule for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Hold a change, what it is by itself (None: no plan has it alone), and at its best."""

    move: str
    pins: Mapping[str, int | str]
    exact: Outcome | None
    free: Outcome
    near: bool
    obstacle: str = ""


def why_not(answer: Answer) -> tuple[Neighbour, ...]:
    """Return the neighbours of the best plan, those that come nearest to it first."""
    assert answer.best is not None
    request = as_now(answer)
    again = Again(answer, request)
    found = [_neighbour(again, answer.best, move) for move in moves_of(request, answer.best.choice)]
    return tuple(sorted(found, key=_nearness))


def as_now(answer: Answer) -> Request:
    """Return the request on as many devices as the best plan takes, which are asked to be fast."""
    assert answer.best is not None
    pins = answer.request.pins.having("devices", answer.best.choice.devices)
    return replace(answer.request, pins=pins, objective="time")


def outcome_of(again: Again, best: Ranked, choice: Choice) -> Outcome:
    """Return what speaks against one plan beside the best."""
    closed = again.closed(choice)
    problems = again.problems(choice)
    if problems:
        return Outcome(verdict="refused", problems=problems)
    if again.fits(choice) and again.close(best, choice):
        return against(again, best, again.timed(choice))
    return against(again, best, closed)


def against(again: Again, best: Ranked, other: Ranked) -> Outcome:
    """Return what the bytes, or else the seconds, of a legal plan say against it."""
    over = other.estimate.bytes_held - again.request.memory_bytes
    # Of both plans the bytes of closed forms: lists are there of plans of an answer only.
    grown = byte_differences(again.closed(best.choice).estimate, other.estimate)
    more = tuple((name, count) for name, count in grown if count > 0)
    if over > 0:
        rank = fullest_rank(other)
        return Outcome(verdict="too large", plan=other, over_bytes=over, grown=more, rank=rank)
    first, second = again.alike(best, other)
    slower = difference(first.estimate, second.estimate)
    share = slower.value / first.estimate.step_s
    verdict: Verdict = "slower" if share > 0 else "faster"
    return Outcome(
        verdict="as fast" if abs(share) < ALIKE else verdict,
        plan=second,
        grown=more,
        slower_s=slower,
        share=share,
        terms=term_differences(first.estimate, second.estimate),
    )


def fullest_rank(one: Ranked) -> str:
    """Return which ranks hold most: those of the first stage, or of the last, with the logits."""
    mesh = one.choice.mesh
    if mesh.pp == 1:
        return "every rank" if mesh.world_size > 1 else "the rank"
    each = mesh.world_size // mesh.pp
    place = mesh.pp - 1 if one.estimate.bytes["logits"] > 0 else 0
    return f"pp rank {place} (ranks {place * each} to {(place + 1) * each - 1})"


def _neighbour(again: Again, best: Ranked, move: Move) -> Neighbour:
    request = again.request
    exact = None if move.exact is None else outcome_of(again, best, move.exact)
    pins = request.pins
    for name, value in move.pins.items():
        pins = pins.having(name, value)
    fitting = exact is not None and exact.slower_s is not None
    found = again.search(pins, among=(move.exact,) if move.exact is not None and fitting else ())
    if found.best is not None:
        free = against(again, best, found.best)
    elif found.seen:
        free = _leanest(request, exact, found.least_bytes)
    else:
        problems = tuple(_refusals(request, move, exact, found.refused))
        free = Outcome(verdict="refused", problems=problems)
    return Neighbour(
        move=move.name,
        pins=move.pins,
        exact=exact,
        free=free,
        near=found.near,
        obstacle=move.obstacle,
    )


def _leanest(request: Request, exact: Outcome | None, least_bytes: float) -> Outcome:
    """Return by how much everything with a change is too large; or the change by itself is."""
    over = least_bytes - request.memory_bytes
    if over > 0 or exact is None or exact.verdict != "too large":
        return Outcome(verdict="too large", over_bytes=max(0.0, over))
    return exact


def _refusals(
    request: Request, move: Move, exact: Outcome | None, refused: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield why no plan has a change: what is wrong with it alone, or the rules that were met."""
    if exact is not None and exact.problems:
        yield from exact.problems
        return
    said = ", ".join(f"{k}={v}" for k, v in move.pins.items())
    counted = [
        f"{rule} ({count})" for rule, count in refused.items() if rule != PLAN_FITS_MEMORY.id
    ]
    because = ", ".join(counted) or move.obstacle or "the mesh has no such place"
    yield NO_PLAN_IS_LEGAL.problem(
        f"no plan over {request.pins.values['devices'][0]} devices has {said}: {because}"
    )


def _nearness(one: Neighbour) -> tuple[int, float]:
    places: Mapping[Verdict, int] = {"too large": 1, "refused": 2}
    value = one.free.share if one.free.slower_s is not None else one.free.over_bytes
    return places.get(one.free.verdict, 0), value
