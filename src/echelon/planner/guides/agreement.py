"""What all guides say of one situation, and where they differ from one another and from a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from echelon.core.plan import Plan
from echelon.planner.guides.documents import TREES
from echelon.planner.guides.preferences import PREFERENCES, Preference
from echelon.planner.guides.questions import Answer
from echelon.planner.guides.situation import Situation
from echelon.planner.guides.sizes import rows_for
from echelon.planner.guides.strategy import Outcome, Strategy, outcome
from echelon.planner.guides.trees import Path, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Hold what one guide says: the strategy, what it comes to, and the path that led there.

    A row of the size guide has no path, but a `note`: the corner at which it is known to fail.
    """

    id: str
    source: str
    strategy: Strategy
    outcome: Outcome | None
    path: Path | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Say that no plan can follow two guides."""

    one: str
    other: str
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """Hold all advice for a situation, and where it conflicts."""

    situation: Situation
    advice: tuple[Advice, ...]
    preferences: tuple[tuple[Preference, Answer], ...]
    conflicts: tuple[Conflict, ...]

    def against(self, plan: Plan) -> tuple[tuple[Advice, tuple[str, ...]], ...]:
        """Return each advice with what `plan` does otherwise; nothing where they agree."""
        return tuple((advice, advice.strategy.differs_from(plan)) for advice in self.advice)


def advise(situation: Situation) -> Advised:
    """Return what every tree and every row of the size guide says of a situation."""
    advice = (*_of_trees(situation), *_of_sizes(situation))
    return Advised(
        situation=situation,
        advice=advice,
        preferences=tuple((each, each.question.ask(situation)) for each in PREFERENCES),
        conflicts=tuple(_conflicts(advice)),
    )


def _of_trees(situation: Situation) -> Iterator[Advice]:
    for tree in TREES:
        path = walk(tree, situation)
        yield Advice(
            id=tree.id,
            source=tree.source,
            strategy=path.strategy,
            outcome=outcome(path.strategy, situation),
            path=path,
        )


def _of_sizes(situation: Situation) -> Iterator[Advice]:
    for row in rows_for(situation):
        yield Advice(
            id=row.id,
            source="003, section 10",
            strategy=row.strategy,
            outcome=outcome(row.strategy, situation),
            note=row.corner,
        )


def _conflicts(advice: tuple[Advice, ...]) -> Iterator[Conflict]:
    for one, other in combinations(advice, 2):
        where = one.strategy.conflicts_with(other.strategy)
        if where:
            yield Conflict(one=one.id, other=other.id, where=where)
