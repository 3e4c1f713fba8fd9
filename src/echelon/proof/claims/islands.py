# SPDX-License-Identifier: Apache-2.0
"""Islands of local SGD: each beside a training of its own, and all of them where they meet.

To the other claims an island is a plan by itself (`layout/islands.py`): whatever holds of a run
must hold of it, with its share of the samples. What islands make of their meetings, and that they
agree on it, are claims more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from echelon.core.plan import Plan
from echelon.layout.islands import Island, island_plan, islands_of
from echelon.proof.claims.checks import Check, exact_check, tensor_error
from echelon.proof.claims.plan_evidence import PlanEvidence, RoundsEvidence
from echelon.proof.claims.tolerance import FACTORS, own_tolerance
from echelon.proof.evidence.evidence import float64_tolerance
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.late import LateRun
from echelon.proof.observed import ObservedRun, routing_from_ranks
from echelon.proof.oracle.local_sgd import IslandOracle, run_islands
from echelon.proof.oracle.operations import ForcedRouting
from echelon.proof.oracle.optimizers import global_norm
from echelon.proof.oracle.oracle import OracleStep
from echelon.proof.ranks import RankResult, read_results

OUTER_PARAMETERS, OUTER_MOMENTUM = "outer.parameters", "outer.momentum"
"""Kinds of tensors that a subject with islands tells."""


def outer_steps(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare outer parameters, and in float64 their momentum, with the formula's after each step.

    A momentum is a sum of differences of values: in a precision of few digits their rounding is
    most of it.
    """
    rounds = evidence.rounds
    if rounds is None:
        return
    for one in rounds.outer:
        yield from _kind(evidence, OUTER_PARAMETERS, one.step, one.after)
        if rounds.local.outer == "nesterov" and not evidence.tolerance.own_precision:
            yield from _kind(evidence, OUTER_MOMENTUM, one.step, one.momentum_after)


def _kind(
    evidence: PlanEvidence, kind: str, step: int, oracle: Mapping[str, torch.Tensor]
) -> Iterator[Check]:
    total = global_norm(oracle)
    for position, (name, right) in enumerate(oracle.items()):
        scale = max(float(right.double().norm()), FLOOR * total)
        error = tensor_error(evidence.run, kind, step, name, right)
        yield Check(
            step,
            name,
            error / scale if scale else error,
            allowed=evidence.tolerance.allowed("masters", step, name),
            detail=f"the {kind.replace('.', ' ')}",
            position=position,
        )


def islands_agree(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the outer state of an island with that of the first, bit for bit."""
    rounds = evidence.rounds
    if rounds is None:
        return
    first = rounds.observed[0]
    for one in rounds.outer:
        for kind in (OUTER_PARAMETERS, OUTER_MOMENTUM):
            for position, name in enumerate(evidence.run.specs):
                mine = evidence.run.parts(kind, one.step, name)
                theirs = first.parts(kind, one.step, name)
                same = len(mine) == len(theirs) and all(
                    torch.equal(a.tensor, b.tensor) for a, b in zip(mine, theirs, strict=True)
                )
                problem = f"the {kind.replace('.', ' ')} is not that of island 0" * (not same)
                yield exact_check(one.step, name, problem, position)


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandRun:
    """Name what the ranks of all islands ran: number `number` of the plans in a folder."""

    plan: Plan
    reference: Plan
    num_steps: int
    number: int
    directory: Path


def island_evidence(run: IslandRun, late: LateRun | None) -> list[PlanEvidence]:
    """Return the two sides of the proof of each island.

    In the plan's own precision, of every number but the first, tokens go where ranks sent them.
    """
    plan, found = run.plan, islands_of(run.plan)
    folder = run.directory / "late" if late is not None and late.races else run.directory
    results = read_results(folder, run.number, plan.mesh.world_size)
    plans = [island_plan(plan, one.index) for one in found]
    observed = [
        ObservedRun(own, _of_island(results, one)) for own, one in zip(plans, found, strict=True)
    ]
    forced: Sequence[Sequence[ForcedRouting] | None] | None = None
    if run.number:
        forced = [routing_from_ranks(one, run.num_steps) for one in observed]
    exact = run_islands(run.reference, run.num_steps, forced=forced)
    rough: list[IslandOracle] = []
    if run.number:
        rough = [run_islands(plan, run.num_steps, factor=f, forced=forced) for f in FACTORS]
    evidence: list[PlanEvidence] = []
    for one, own, seen in zip(found, plans, observed, strict=True):
        oracle, tolerance = exact.islands[one.index], float64_tolerance()
        rounded = [each.islands[one.index] for each in rough]
        if rounded:
            tolerance = own_tolerance(own, oracle, rounded, has_masters=seen.has_masters)
        evidence.append(
            PlanEvidence(
                plan=own,
                reference_plan=island_plan(run.reference, one.index),
                steps=oracle,
                run=seen,
                tolerance=tolerance,
                late=_late_of_island(run, late, own, one),
                rounded=rounded,
                rounds=RoundsEvidence(
                    plan=plan, island=one, outer=exact.outer, observed=tuple(observed)
                ),
            )
        )
    return evidence


def run_island(
    run: IslandRun,
    island: int,
    initial: Mapping[str, torch.Tensor],
    forced: Sequence[ForcedRouting],
) -> tuple[OracleStep, ...]:
    """Return the steps of an island of the oracle, whose islands begin from other values."""
    routes = [forced if index == island else None for index in range(len(islands_of(run.plan)))]
    return run_islands(run.plan, run.num_steps, initial=initial, forced=routes).islands[island]


def _of_island(results: Sequence[RankResult], island: Island) -> list[RankResult]:
    """Return what the ranks of an island said, under their places in it."""
    mine = results[island.first_rank : island.first_rank + island.size]
    return [
        replace(
            one,
            rank=place,
            shards=tuple(replace(shard, rank=place) for shard in one.shards),
            activations=tuple(replace(passed, rank=place) for passed in one.activations),
        )
        for place, one in enumerate(mine)
    ]


def _late_of_island(
    run: IslandRun, late: LateRun | None, plan: Plan, island: Island
) -> LateRun | None:
    if late is None or late.observed is None:
        return late
    results = read_results(run.directory / "late", run.number, run.plan.mesh.world_size)
    own = [race for race in late.races if island.local(race.rank) in range(island.size)]
    first, last = island.first_rank, island.first_rank + island.size
    return replace(
        late,
        races=tuple(own),
        num_operations=late.num_operations[first:last],
        observed=ObservedRun(plan, _of_island(results, island)),
    )
