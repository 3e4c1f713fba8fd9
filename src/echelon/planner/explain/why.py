# SPDX-License-Identifier: Apache-2.0
"""Why the best plan of an answer is what it is: what binds it, and what its step waits for.

What binds is asked, not guessed: the same search with memory without end, and with twice the batch,
each says how much faster a step would be for each token. What gives nothing binds nothing.
`explain_result` adds the neighbours, and what would change the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from echelon.planner.explain.neighbours import (
    CandidateDifference,
    Neighbour,
    explain_neighbours,
    fullest_rank,
    neighbouring_changes,
    request_on_same_devices,
)
from echelon.planner.explain.repeat_search import RepeatSearch
from echelon.planner.explain.sensitivity import SensitivityResult, WhatIf, sensitivity, with_batch
from echelon.planner.predict.bands import (
    BandedTerms,
    BandedValue,
    held_bytes_band,
    mfu_band,
    step_band,
    step_term_bands,
)
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult

BindingKind = Literal["memory", "batch", "divisibility"]
_UNBOUND_MEMORY = 64.0  # times the memory of a device
_BINDS = 0.002
"""A share of a step that a constraint must cost to bind."""
COMPUTE_TERMS = ("matmul", "attention", "memory", "head")
"""Terms that are the model's own computing; the others are what a step waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingConstraint:
    """Name a constraint, by which share a step would be shorter without it, and with which plan.

    Of divisibility the gain is not known: a plan that breaks a rule has no seconds.
    """

    kind: BindingKind
    gain: float | None
    differences: tuple[CandidateDifference, ...] = ()
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlanReasons:
    """Hold what binds the best plan, strongest first, and the terms of its step."""

    best: RankedPlan
    """The plan."""
    step: BandedValue
    """Seconds of its step."""
    held: BandedValue
    """Bytes of its fullest rank."""
    mfu: BandedValue
    """Model FLOP/s over the peak of all devices."""
    memory_bytes: float
    """Bytes of a device."""
    fullest: str
    """The rank that holds most."""
    binding: tuple[BindingConstraint, ...]
    """What binds it, strongest first."""
    work_s: float
    """Seconds of the model's own computing."""
    ideal_s: float
    """What that would take at the peak of all devices."""
    exposed: BandedTerms
    """What a step takes beside it, the largest first."""
    near: bool
    """Whether only plans near the best one were searched again for what binds it."""

    @property
    def memory_share(self) -> float:
        """Return which share of a device's memory the fullest rank takes."""
        return self.held.value / self.memory_bytes


def explain_best(answer: SearchResult) -> BestPlanReasons:
    """Return why the best plan is the best; an answer without one has no reason to tell."""
    best = answer.first
    terms = step_term_bands(best.estimate)
    exposed = [
        (name, amount)
        for name, amount in terms.items()
        if name not in COMPUTE_TERMS and amount.high > 0
    ]
    relaxed = sensitivity(answer, _relaxed(answer))
    return BestPlanReasons(
        best=best,
        step=step_band(best.estimate),
        held=held_bytes_band(best.estimate),
        mfu=mfu_band(best.estimate),
        memory_bytes=answer.request.memory_bytes,
        fullest=fullest_rank(best),
        binding=_binding(answer, relaxed),
        work_s=sum(best.estimate.seconds[name] for name in COMPUTE_TERMS),
        ideal_s=best.estimate.mfu * best.estimate.step_s,
        exposed=dict(sorted(exposed, key=lambda term: -term[1].value)),
        near=any(change.near for change in relaxed),
    )


def _relaxed(answer: SearchResult) -> tuple[WhatIf, ...]:
    """Return the questions that say what binds."""
    request, choice = answer.request, answer.first.candidate
    larger = with_batch(request, 2 * request.mathematics.global_sequences)
    doubled = replace(choice, microbatches=2 * choice.microbatches)
    roomy = request.with_memory(_UNBOUND_MEMORY * request.memory_bytes)
    return (
        WhatIf(name="memory", request=roomy, current_plan=choice),
        WhatIf(name="batch", request=larger, current_plan=doubled),
    )


def _binding(
    answer: SearchResult, relaxed: tuple[SensitivityResult, ...]
) -> tuple[BindingConstraint, ...]:
    kinds: tuple[BindingKind, ...] = ("memory", "batch")
    found = [
        BindingConstraint(kind=kind, gain=change.gain, differences=change.differences)
        for kind, change in zip(kinds, relaxed, strict=True)
        if change.gain > _BINDS
    ]
    found.sort(key=lambda one: -(one.gain or 0.0))
    rules = _refusing(answer, request_on_same_devices(answer))
    if rules:
        found.append(BindingConstraint(kind="divisibility", gain=None, rules=rules))
    return tuple(found)


def _refusing(answer: SearchResult, request: SearchRequest) -> tuple[str, ...]:
    """Return the rules that forbid the next degree of an axis, with everything else as it is."""
    again = RepeatSearch(answer, request)
    rules: dict[str, None] = {}
    for move in neighbouring_changes(request, answer.first.candidate):
        if move.candidate is not None and next(iter(move.pins)) in ("tp", "pp", "cp", "ep"):
            rules.update(dict.fromkeys(one.rule for one in again.problems(move.candidate)))
    return tuple(rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Hold what is told of the best plan of an answer."""

    why: BestPlanReasons
    neighbours: tuple[Neighbour, ...]
    changes: tuple[SensitivityResult, ...]


def explain_result(answer: SearchResult) -> Explanation:
    """Return what is told of the best plan of an answer, which has one."""
    return Explanation(
        why=explain_best(answer), neighbours=explain_neighbours(answer), changes=sensitivity(answer)
    )
