# SPDX-License-Identifier: Apache-2.0
"""A situation by every guide and by a plan: what they say, where they agree and differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from echelon.core.plan import Plan
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.handbook.guides.practices import PREFERENCES, SIZE_GUIDE, Preference, rows_for
from echelon.handbook.guides.situation import GuideAnswer, PlanSituation
from echelon.handbook.guides.strategy import (
    Strategy,
    StrategyOutcome,
    advice_rows,
    strategy_outcome,
)
from echelon.handbook.guides.trees import TREES, DecisionTree, TreeSteps
from echelon.planner.predict.estimate import estimate_from_inputs
from echelon.planner.predict.split_memory import GuideSplit, cost_inputs_from_split


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyKind:
    """Name a strategy of the tables, what it cuts and sends in a step, and the claims about it."""

    strategy: Strategy
    cuts: str
    sends: str
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """Hold what a kind comes to; no outcome where it cannot use all devices."""

    kind: StrategyKind
    outcome: StrategyOutcome | None
    step_s: float | None
    across_nodes: tuple[str, ...]


STRATEGY_KINDS = tuple(StrategyKind(**row) for row in advice_rows("kind"))


def compare_strategies(
    situation: PlanSituation, software: TrainerConstants
) -> Iterator[StrategyRow]:
    """Yield every strategy with the situation's numbers; seconds are those of a trainer."""
    for kind in STRATEGY_KINDS:
        found = strategy_outcome(kind.strategy, situation)
        yield StrategyRow(
            kind=kind,
            outcome=found,
            step_s=None
            if found is None or not found.fits
            else step_seconds_of(situation.plan, found.split, kind.strategy, software),
            across_nodes=() if found is None else across_nodes(found.split, situation.domain),
        )


def step_seconds_of(
    plan: Plan, split: GuideSplit, strategy: Strategy, software: TrainerConstants
) -> float:
    """Return the seconds of a step of the model and batch of `plan`, split otherwise."""
    work = replace(cost_inputs_from_split(plan, split, strategy.recompute), software=software)
    return estimate_from_inputs(work, plan.mathematics, plan.cluster).step_s


def across_nodes(split: GuideSplit, domain: int) -> tuple[str, ...]:
    """Return the axes whose groups lie on several nodes, ranks being ordered as `core/mesh.py` has.

    Tensor ranks are neighbours, then context, data and pipeline ranks: an axis stays inside where
    its groups, with all inside of them, fill an even part of a node (of `domain` devices).
    """
    found: list[str] = []
    span = 1
    for axis, degree in (("tp", split.tp), ("cp", split.cp), ("dp", split.dp), ("pp", split.pp)):
        span *= degree
        if degree > 1 and domain % span:
            found.append(axis)
    return tuple(found)


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
