"""Everything that is told of an answer at once: why, why not, and what would change it."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.planner.explain.neighbours import Neighbour, why_not
from echelon.planner.explain.sensitivity import Change, sensitivity
from echelon.planner.explain.why import Why, why
from echelon.planner.search import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Hold what is told of the best plan of an answer."""

    why: Why
    neighbours: tuple[Neighbour, ...]
    changes: tuple[Change, ...]


def explanation_of(answer: Answer) -> Explanation:
    """Return what is told of the best plan of an answer, which has one."""
    return Explanation(why=why(answer), neighbours=why_not(answer), changes=sensitivity(answer))
