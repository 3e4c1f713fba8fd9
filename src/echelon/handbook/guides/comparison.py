# SPDX-License-Identifier: Apache-2.0
"""The guides' tables of strategies, with the reader's numbers in place of "low" and "high".

Each row is one way to use all devices: what it cuts and sends, what the fullest rank holds, how
long a step takes, and which axes use links between nodes. Cells that a guide has wrong name the
claim of the errata that mends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.core.plan import Plan
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.handbook.guides.situation import PlanSituation
from echelon.handbook.guides.strategy import (
    Strategy,
    StrategyOutcome,
    advice_rows,
    strategy_outcome,
)
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
