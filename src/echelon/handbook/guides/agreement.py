# SPDX-License-Identifier: Apache-2.0
"""What all guides say of one situation, and where they differ from one another and from a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from echelon.core.plan import Plan
from echelon.handbook.guides.practices import PREFERENCES, Preference
from echelon.handbook.guides.situation import GuideAnswer, PlanSituation
from echelon.handbook.guides.sizes import SIZE_GUIDE, rows_for
from echelon.handbook.guides.strategy import Strategy, StrategyOutcome, strategy_outcome
from echelon.handbook.guides.trees import TREES, DecisionTree, TreeSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Hold what one guide says: the strategy, what it comes to, and the steps that led there.

    A row of the size guide has no tree, but a `note`: the corner at which it is known to fail.
    """

    id: str
    source: str
    strategy: Strategy
    outcome: StrategyOutcome | None
    tree: DecisionTree | None = None
    steps: TreeSteps = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SituationAdvice:
    """Hold all advice for a situation, and where it conflicts.

    A conflict says by their ids which two guides no plan can follow both, and where they differ.
    """

    situation: PlanSituation
    advice: tuple[Advice, ...]
    preferences: tuple[tuple[Preference, GuideAnswer], ...]
    conflicts: tuple[tuple[str, str, tuple[str, ...]], ...]

    def against(self, plan: Plan) -> tuple[tuple[Advice, tuple[str, ...]], ...]:
        """Return each advice with what `plan` does otherwise; nothing where they agree."""
        return tuple((advice, advice.strategy.differs_from(plan)) for advice in self.advice)


def advise(situation: PlanSituation) -> SituationAdvice:
    """Return what every tree and every row of the size guide says of a situation."""
    advice = (*_of_trees(situation), *_of_sizes(situation))
    conflicts = (
        (one.id, other.id, one.strategy.conflicts_with(other.strategy))
        for one, other in combinations(advice, 2)
    )
    return SituationAdvice(
        situation=situation,
        advice=advice,
        preferences=tuple((each, each.question.ask(situation)) for each in PREFERENCES),
        conflicts=tuple(conflict for conflict in conflicts if conflict[2]),
    )


def _of_trees(situation: PlanSituation) -> Iterator[Advice]:
    for tree in TREES:
        steps, strategy = tree.walk(situation)
        yield Advice(
            id=tree.id,
            source=tree.source,
            strategy=strategy,
            outcome=strategy_outcome(strategy, situation),
            tree=tree,
            steps=steps,
        )


def _of_sizes(situation: PlanSituation) -> Iterator[Advice]:
    for row in rows_for(situation):
        yield Advice(
            id=row.id,
            source=SIZE_GUIDE,
            strategy=row.strategy,
            outcome=strategy_outcome(row.strategy, situation),
            note=row.corner,
        )
