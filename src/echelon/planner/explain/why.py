"""Why the best plan of an answer is what it is: what binds it, and what its step waits for.

What binds is asked, not guessed: the same search with memory without end, and with twice the batch,
each says how much faster a step would be for each token. What gives nothing binds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from echelon.planner.explain.again import Again
from echelon.planner.explain.bands import Banded, Term, held_of, mfu_of, step_of, terms_of
from echelon.planner.explain.differences import Difference
from echelon.planner.explain.moves import moves_of
from echelon.planner.explain.neighbours import as_now, fullest_rank
from echelon.planner.explain.sensitivity import Change, sensitivity
from echelon.planner.explain.what_if import WhatIf, with_batch, with_memory
from echelon.planner.ranked import Ranked
from echelon.planner.request import Request
from echelon.planner.search import Answer

Kind = Literal["memory", "batch", "divisibility"]
UNBOUND_MEMORY = 64.0
BINDS = 0.002
"""A share of a step that a constraint must cost to bind."""
WORK = ("products", "attention", "memory", "head")
"""Terms that are the model's own computing; the others are what a step waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Name a constraint, by which share a step would be shorter without it, and with which plan.

    Of divisibility the gain is not known: a plan that breaks a rule has no seconds.
    """

    kind: Kind
    gain: float | None
    differences: tuple[Difference, ...] = ()
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Hold what binds the best plan, strongest first, and the terms of its step.

    `exposed` is what a step takes beside the model's own computing, the largest first; `work_s` is
    that computing, `ideal_s` what it would take at the peak of all devices.
    """

    best: Ranked
    step: Banded
    held: Banded
    mfu: Banded
    memory_bytes: float
    fullest: str
    binding: tuple[Binding, ...]
    work_s: float
    ideal_s: float
    exposed: tuple[Term, ...]
    near: bool

    @property
    def memory_share(self) -> float:
        """Return which share of a device's memory the fullest rank takes."""
        return self.held.value / self.memory_bytes


def why(answer: Answer) -> Why:
    """Return why the best plan is the best; an answer without one has no reason to tell."""
    assert answer.best is not None
    best = answer.best
    terms = terms_of(best.estimate)
    exposed = [term for term in terms if term.name not in WORK and term.amount.high > 0]
    relaxed = sensitivity(answer, _relaxed(answer))
    return Why(
        best=best,
        step=step_of(best.estimate),
        held=held_of(best.estimate),
        mfu=mfu_of(best.estimate),
        memory_bytes=answer.request.memory_bytes,
        fullest=fullest_rank(best),
        binding=_binding(answer, relaxed),
        work_s=sum(best.estimate.seconds[name] for name in WORK),
        ideal_s=best.estimate.mfu * best.estimate.step_s,
        exposed=tuple(sorted(exposed, key=lambda term: -term.amount.value)),
        near=any(change.near for change in relaxed),
    )


def _relaxed(answer: Answer) -> tuple[WhatIf, ...]:
    """Return the questions that say what binds."""
    assert answer.best is not None
    request, choice = answer.request, answer.best.choice
    larger = with_batch(request, 2 * request.mathematics.global_sequences)
    doubled = answer.best.choice.microbatches * 2
    roomy = with_memory(request, UNBOUND_MEMORY * request.memory_bytes)
    return (
        WhatIf(name="memory", request=roomy, same=choice),
        WhatIf(name="batch", request=larger, same=replace(choice, microbatches=doubled)),
    )


def _binding(answer: Answer, relaxed: tuple[Change, ...]) -> tuple[Binding, ...]:
    found: list[Binding] = []
    kinds: tuple[Kind, ...] = ("memory", "batch")
    for kind, change in zip(kinds, relaxed, strict=True):
        if change.gain > BINDS:
            found.append(Binding(kind=kind, gain=change.gain, differences=change.differences))
    found.sort(key=lambda one: -(one.gain or 0.0))
    rules = _refusing(answer, as_now(answer))
    if rules:
        found.append(Binding(kind="divisibility", gain=None, rules=rules))
    return tuple(found)


def _refusing(answer: Answer, request: Request) -> tuple[str, ...]:
    """Return the rules that forbid the next degree of an axis, with everything else as it is."""
    assert answer.best is not None
    again = Again(answer, request)
    rules: dict[str, None] = {}
    for move in moves_of(request, answer.best.choice):
        if move.exact is not None and next(iter(move.pins)) in ("tp", "pp", "cp", "ep"):
            rules.update(dict.fromkeys(one.rule for one in again.problems(move.exact)))
    return tuple(rules)
