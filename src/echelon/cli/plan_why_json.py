"""An explanation of an answer as JSON values; every number that is estimated has its band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.planner.choice import Choice
    from echelon.planner.explain.bands import Term
    from echelon.planner.explain.explanation import Explanation
    from echelon.planner.explain.fixes import Fix
    from echelon.planner.explain.neighbours import Neighbour, Outcome
    from echelon.planner.explain.sensitivity import Change
    from echelon.planner.search import Answer

WHY_SCHEMA = 1


def why_json(answer: Answer) -> dict[str, Any]:
    """Return why the best plan of an answer is the best, as JSON values."""
    from echelon.planner.explain.explanation import explanation_of

    return explanation_json(explanation_of(answer))


def explanation_json(told: Explanation) -> dict[str, Any]:
    """Return an explanation as JSON values."""
    why = told.why
    return {
        "schema": WHY_SCHEMA,
        "step_s": asdict(why.step),
        "held_bytes": asdict(why.held),
        "mfu": asdict(why.mfu),
        "memory_bytes": why.memory_bytes,
        "fullest": why.fullest,
        "binding": [asdict(one) for one in why.binding],
        "work_s": why.work_s,
        "ideal_s": why.ideal_s,
        "exposed": _terms(why.exposed),
        "neighbours": [_neighbour(one) for one in told.neighbours],
        "changes": [_change(one) for one in told.changes],
        "searched": "near the plan" if why.near else "everything",
    }


def fixes_json(fixes: Sequence[Fix]) -> list[dict[str, Any]]:
    """Return what makes a plan fit as JSON values, the cheapest first."""
    return [
        {
            "changes": list(fix.changes),
            "settings": dict(fix.settings),
            "devices": fix.devices,
            "saved_bytes": fix.saved_bytes,
            "held_bytes": fix.estimate.bytes_held,
            "step_s": fix.estimate.step_s,
            "lost_s": asdict(fix.lost_s),
            "lost_share": fix.lost_share,
            "timed": not fix.untimed,
        }
        for fix in fixes
    ]


def _neighbour(one: Neighbour) -> dict[str, Any]:
    return {
        "change": one.move,
        "pins": dict(one.pins),
        "at_its_best": _outcome(one.free),
        "alone": None if one.exact is None else _outcome(one.exact),
        "obstacle": one.obstacle,
    }


def _outcome(one: Outcome) -> dict[str, Any]:
    return {
        "verdict": one.verdict,
        "problems": [problem.to_json() for problem in one.problems],
        "over_bytes": one.over_bytes,
        "rank": one.rank,
        "more_bytes": dict(one.grown),
        "slower_s": None if one.slower_s is None else asdict(one.slower_s),
        "slower_share": one.share,
        "terms": _terms(one.terms),
        "plan": None if one.plan is None else _choice(one.plan.choice),
    }


def _change(one: Change) -> dict[str, Any]:
    return {
        "change": one.name,
        "fits": one.best is not None,
        "gain": one.gain,
        "gain_of_this_plan": one.gain_same,
        "differences": [asdict(part) for part in one.differences],
        "plan": None if one.best is None else _choice(one.best.choice),
        "step_s": None if one.best is None else one.best.estimate.step_s,
    }


def _terms(terms: Sequence[Term]) -> list[dict[str, Any]]:
    return [{"name": term.name, **asdict(term.amount)} for term in terms]


def _choice(choice: Choice) -> dict[str, Any]:
    return asdict(choice)
