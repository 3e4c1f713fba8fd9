# SPDX-License-Identifier: Apache-2.0
"""Replays in which something is done wrong: that which gives what islands have is told."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.axis import Axis
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.claims.claims import ClaimResult, first_failure
from echelon.proof.lost_islands.claims import LostIslandEvidence, errors_of
from echelon.proof.lost_islands.replay import MeetingMistake, MeetingReplay

EXPLAINED = 1e-8
"""What a mistake may leave unexplained, relative: others leave far more."""

MISTAKES = (
    MeetingMistake(
        name="absent counted",
        says="the sum over the islands that met is divided by the number of all, though one was "
        "not there",
        divides_by_all=True,
    ),
    MeetingMistake(
        name="momentum not given",
        says="an island that comes back begins without the outer momentum of the others",
        no_momentum=True,
    ),
    MeetingMistake(
        name="parameters not given",
        says="an island that comes back goes on from the first values of the run",
        own_values=True,
    ),
    MeetingMistake(
        name="momentum reset",
        says="the outer momentum begins anew where others meet than before",
        momentum_anew=True,
    ),
    MeetingMistake(
        name="islands",
        says="what islands moved is added up, and not divided by the number of those that met",
        adds_up=True,
    ),
)


def diagnose_lost_island(
    evidence: LostIslandEvidence, results: Sequence[ClaimResult]
) -> Diagnosis | None:
    """Return what is wrong with a run, where something is."""
    failed = first_failure(results)
    if failed is None:
        return None
    result, failure = failed
    mistake = _explaining(evidence)
    says = failure.detail or f"off by {failure.error:.2g}, allowed {failure.allowed:.0e}"
    return Diagnosis(
        rule=result.rule.id,
        step=failure.step,
        tensor=failure.subject,
        where="",
        factor="none" if mistake is None else mistake.name,
        axis=Axis.DP_REPLICATE.value,
        value=None,
        says=says if mistake is None else mistake.says,
        residual=failure.error,
        ranks=(),
        num_wrong=len(result.failures),
        num_compared=result.compared,
    )


def _explaining(evidence: LostIslandEvidence) -> MeetingMistake | None:
    """Return the mistake whose replay gives what islands have, where the right one does not."""
    if _largest_error(evidence, evidence.replay) < EXPLAINED:
        return None
    for mistake in MISTAKES:
        if (
            _largest_error(evidence, MeetingReplay(evidence.plan, evidence.met, mistake).run())
            < EXPLAINED
        ):
            return mistake
    return None


def _largest_error(evidence: LostIslandEvidence, replay: MeetingReplay) -> float:
    return max(
        error
        for record in evidence.records
        for error in errors_of(replay, record, evidence.island_of(record.rank)).values()
    )
