# SPDX-License-Identifier: Apache-2.0
"""The first race of a run with late completion: which operation, over which axis, seen where."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.rulebook import races as rules
from echelon.core.rules import Rule
from echelon.parallel.completion.in_flight import Race, RaceKind
from echelon.proof.claims.claims import ClaimResult, first_failure
from echelon.proof.diagnose.diagnosis import Diagnosis
from echelon.proof.late import LateRun

RACE_RULES: dict[RaceKind, Rule] = {
    RaceKind.NEVER_AWAITED: rules.PROVE_AWAITED,
    RaceKind.USED: rules.PROVE_AWAITED,
    RaceKind.CHANGED: rules.PROVE_IN_FLIGHT,
    RaceKind.FREED: rules.PROVE_FREED,
    RaceKind.USED_FREED: rules.PROVE_FREED,
    RaceKind.FREED_TWICE: rules.PROVE_FREED,
}
"""The rule that each kind of race breaks."""


def diagnose_races(late: LateRun | None, results: Sequence[ClaimResult]) -> Diagnosis | None:
    """Return what the first race is, and what is wrong by it; None where there is none.

    The first one is the cause of those that follow: what is read too early is sent on.
    """
    if late is None or not late.races:
        return None
    first = min(late.races, key=lambda race: race.when_s)
    alike = [race for race in late.races if _same_operation(race, first)]
    broken = {rule.id for rule in RACE_RULES.values()}
    wrong = first_failure([result for result in results if result.rule.id not in broken])
    says = f"{first.kind}: {first.says}"
    if wrong is not None:
        result, failure = wrong
        says += f"; the first wrong value is {failure.subject} in step {failure.step}"
        says += f" ({result.statement})"
    return Diagnosis(
        rule=RACE_RULES[first.kind].id,
        step=first.step,
        tensor=first.operation,
        where=f"at {first.at}" if first.at else "",
        factor=str(first.kind),
        axis=first.axis,
        value=None,
        says=says,
        residual=0.0,
        ranks=tuple(sorted({race.rank for race in alike})),
        num_wrong=len({race.operation for race in late.races}),
        num_compared=sum(late.num_operations),
    )


def _same_operation(one: Race, other: Race) -> bool:
    return (one.kind, one.operation) == (other.kind, other.operation)
